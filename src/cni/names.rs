//! The syntax of names in CNI and Kubernetes, and suggestions for misspelled names.

use super::error::{Code, Error};
use ipnet::IpNet;

/// The maximum length of an interface name: the kernel's `IFNAMSIZ` without the terminating zero.
const MAX_INTERFACE_NAME: usize = 15;

/// The maximum length of a network name. A record of saved state is the file `NETWORK@INTERFACE.json`, its temporary name
/// is `.PID.NETWORK@INTERFACE.json`, and the name of a file has up to 255 bytes (NAME_MAX).
pub(super) const MAX_NETWORK_NAME: usize = 225;

/// The interface of a pod's default network: container runtimes of Kubernetes use no other name.
pub const DEFAULT_INTERFACE: &str = "eth0";

/// Returns whether `text` is a valid container ID or network name: `[a-zA-Z0-9][a-zA-Z0-9_.-]*` (reference library, `pkg/utils`).
#[must_use]
pub fn is_identifier(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c))
}

/// Parses a CIDR. As for Go, numbers with a leading zero are invalid.
#[must_use]
pub fn parse_ip_net(text: &str) -> Option<IpNet> {
    let (address, length) = text.split_once('/')?;
    let is_number = length == "0" || !length.starts_with(['0', '+']);
    IpNet::new(address.parse().ok()?, length.parse().ok().filter(|_| is_number)?).ok()
}

/// Checks an interface name as the kernel does (`dev_valid_name`), with the messages of the reference library.
///
/// # Errors
/// [`Code::Environment`], without the name itself.
pub fn check_interface_name(name: &str) -> Result<(), Error> {
    let refuse = |msg| Err(Error::new(Code::Environment, msg));
    if name.is_empty() {
        return refuse("interface name is empty");
    }
    if name.len() > MAX_INTERFACE_NAME {
        let limit = format!("interface name should be less than {} characters", MAX_INTERFACE_NAME + 1);
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

/// Returns whether rules can match the interface name. `iptables` takes a name such as `eth+` for a prefix. An alias
/// such as `eth0:7` is the label of an address and never the interface of a packet.
#[must_use]
pub fn is_matchable_interface(name: &str) -> bool {
    check_interface_name(name).is_ok() && !name.ends_with('+')
}

/// Returns whether `text` is an RFC 1123 label, as Kubernetes requires for the name of a namespace.
#[must_use]
pub fn is_dns_label(text: &str) -> bool {
    text.len() <= 63 && is_label(text)
}

/// Returns whether `text` is an RFC 1123 subdomain, as Kubernetes requires for the name of a pod. Unlike in DNS, its
/// labels may have more than 63 characters (apimachinery, `IsDNS1123Subdomain`).
#[must_use]
pub fn is_dns_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_label)
}

fn is_label(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    !text.is_empty() && text.chars().all(inner) && !text.starts_with('-') && !text.ends_with('-')
}

/// The minimum similarity (Jaro-Winkler) of a suggestion. clap uses 0.7 for subcommands and flags, which for short
/// keys suggests unrelated names.
const MIN_SIMILARITY: f64 = 0.85;

/// The maximum length of a name that is compared, in bytes. Names come from untrusted users, and a comparison costs
/// the product of both lengths.
const MAX_NAME_BYTES: usize = 64;

/// Returns the candidate that is most similar to `given`, if one is similar enough.
pub fn closest<'a>(given: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if given.len() > MAX_NAME_BYTES {
        return None;
    }
    let similarity = |name: &'a str| (strsim::jaro_winkler(&given.to_lowercase(), &name.to_lowercase()), name);
    let similar = candidates.into_iter().map(similarity).filter(|(similarity, _)| *similarity >= MIN_SIMILARITY);
    similar.max_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, name)| name)
}

/// Returns `; did you mean "NAME"?` with the candidate that is most similar to `given`, else an empty string.
pub fn did_you_mean<'a>(given: &str, candidates: impl IntoIterator<Item = &'a str>) -> String {
    closest(given, candidates).map(|name| format!("; did you mean {name:?}?")).unwrap_or_default()
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
    fn interface_names_that_the_kernel_refuses_are_refused() {
        for good in ["e", "eth0", "123456789012345", "...", "a@b"] {
            assert_eq!(check_interface_name(good), Ok(()), "{good}");
        }
        for bad in ["", "1234567890123456", ".", "..", "a/b", "a:b", "a b", "a\t", "a\u{a0}b", "äääääääää"] {
            assert_eq!(check_interface_name(bad).map_err(|e| e.code), Err(Code::Environment), "{bad}");
        }
    }

    #[test]
    fn rules_match_neither_aliases_nor_prefixes() {
        assert!(["eth0", "eth0.7", "a@b", "a+b"].into_iter().all(is_matchable_interface));
        assert!(["eth0:7", "eth+", "+", "a b", "", ".."].into_iter().all(|name| !is_matchable_interface(name)));
    }

    #[test]
    fn kubernetes_names_are_safe_in_urls_and_paths() {
        assert!(is_dns_label("a") && is_dns_label("a-1") && is_dns_label(&"a".repeat(63)));
        let long = "a".repeat(64);
        assert!(["", "-a", "a-", "A", "a.b", "..", "a/b", long.as_str()].iter().all(|bad| !is_dns_label(bad)));
        assert!(is_dns_subdomain("a.b-1.c") && is_dns_subdomain(&"a".repeat(253)));
        let long = "a".repeat(254);
        assert!(["", ".", "..", "a..b", "a.-b", "a_b", "A", "a/b", long.as_str()].iter().all(|b| !is_dns_subdomain(b)));
    }

    #[test]
    fn only_a_similar_name_is_suggested() {
        let candidates = ["chain", "capabilities", "uid-exclude", "dns-exclude", "istio-redirect", "log_level"];
        for (given, wanted) in [
            ("chian", Some("chain")),
            ("Chain", Some("chain")),
            ("uid-exclud", Some("uid-exclude")),
            ("dns_exclude", Some("dns-exclude")),
            ("istio-redirct", Some("istio-redirect")),
            ("loglevel", Some("log_level")),
            ("bridge", None),
            ("portmap", None),
            ("x", None),
            ("", None),
        ] {
            assert_eq!(closest(given, candidates), wanted, "{given}");
        }
        assert_eq!(closest(&"chain".repeat(1 << 20), candidates), None, "it is not compared");
        assert_eq!(did_you_mean("chian", candidates), "; did you mean \"chain\"?");
        assert_eq!(did_you_mean("bridge", candidates), "");
    }
}
