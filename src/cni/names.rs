//! Names that CNI and Kubernetes allow.

use super::{Code, Error};

/// The kernel's `IFNAMSIZ`, less the terminating zero.
const LONGEST_INTERFACE_NAME: usize = 15;

/// The interface of a pod's default network: kubelets' runtimes give it no other name.
pub const DEFAULT_INTERFACE: &str = "eth0";

/// A container ID or the name of a network: `[a-zA-Z0-9][a-zA-Z0-9_.-]*` (reference library, `pkg/utils`).
#[must_use]
pub fn is_identifier(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c))
}

/// Refuses what the kernel does not take as an interface's name (`dev_valid_name`), in the
/// reference library's words.
///
/// # Errors
/// [`Code::Environment`], without the name itself.
pub fn check_interface_name(name: &str) -> Result<(), Error> {
    let refuse = |msg| Err(Error::new(Code::Environment, msg));
    if name.is_empty() {
        return refuse("interface name is empty");
    }
    if name.len() > LONGEST_INTERFACE_NAME {
        let limit = format!("interface name should be less than {} characters", LONGEST_INTERFACE_NAME + 1);
        return refuse("interface name is too long").map_err(|error| error.with_details(limit));
    }
    if name == "." || name == ".." {
        return refuse("interface name is . or ..");
    }
    if name.contains(|c: char| c == '/' || c == ':' || c.is_whitespace()) {
        return refuse("interface name contains / or : or whitespace characters");
    }
    Ok(())
}

/// Whether a rule can name the interface: one that the kernel can have, and that `iptables` does not take for a
/// prefix (`eth+`). An alias such as `eth0:7` is a label of an address: no packet comes or goes by it.
#[must_use]
pub fn is_interface_of_rules(name: &str) -> bool {
    check_interface_name(name).is_ok() && !name.ends_with('+')
}

/// An RFC 1123 label, as Kubernetes wants the name of a namespace.
#[must_use]
pub fn is_dns_label(text: &str) -> bool {
    text.len() <= 63 && is_label(text)
}

/// An RFC 1123 subdomain, as Kubernetes wants the name of a pod. A label in it may have more than
/// 63 characters, unlike in DNS (apimachinery, `IsDNS1123Subdomain`).
#[must_use]
pub fn is_dns_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_label)
}

fn is_label(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    !text.is_empty() && text.chars().all(inner) && !text.starts_with('-') && !text.ends_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_start_with_a_letter_or_digit() {
        assert!(is_identifier("a") && is_identifier("9_a.b-C"));
        assert!(["", "-a", ".a", "a/b", "a b", "ä", "a\n"].iter().all(|bad| !is_identifier(bad)));
    }

    #[test]
    fn interface_names_are_those_that_the_kernel_takes() {
        for good in ["e", "eth0", "123456789012345", "...", "a@b"] {
            assert_eq!(check_interface_name(good), Ok(()), "{good}");
        }
        for bad in ["", "1234567890123456", ".", "..", "a/b", "a:b", "a b", "a\t", "a\u{a0}b", "äääääääää"] {
            assert_eq!(check_interface_name(bad).map_err(|e| e.code), Err(Code::Environment), "{bad}");
        }
    }

    #[test]
    fn rules_name_interfaces_and_neither_aliases_nor_prefixes() {
        assert!(["eth0", "eth0.7", "a@b", "a+b"].into_iter().all(is_interface_of_rules));
        assert!(["eth0:7", "eth+", "+", "a b", "", ".."].into_iter().all(|name| !is_interface_of_rules(name)));
    }

    #[test]
    fn kubernetes_names_can_be_put_into_urls_and_paths() {
        assert!(is_dns_label("a") && is_dns_label("a-1") && is_dns_label(&"a".repeat(63)));
        let long = "a".repeat(64);
        assert!(["", "-a", "a-", "A", "a.b", "..", "a/b", long.as_str()].iter().all(|bad| !is_dns_label(bad)));
        assert!(is_dns_subdomain("a.b-1.c") && is_dns_subdomain(&"a".repeat(253)));
        let long = "a".repeat(254);
        assert!(["", ".", "..", "a..b", "a.-b", "a_b", "A", "a/b", long.as_str()].iter().all(|b| !is_dns_subdomain(b)));
    }
}
