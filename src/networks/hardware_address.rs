//! Hardware addresses in text.

/// Lengths, in octets: EUI-48, EUI-64, InfiniBand's on IP (Go's `net.ParseMAC`, which Multus
/// validates with).
const OCTETS: [usize; 3] = [6, 8, 20];

/// What [`is_hardware_address`] takes, for messages.
pub(super) const ACCEPTED_HARDWARE_ADDRESS: &str = "a hardware address, as 02:00:00:00:00:01";

/// Whether `text` is octets in hexadecimal, two digits between `:` or `-`, or four between dots.
pub(super) fn is_hardware_address(text: &str) -> bool {
    let grouped = |separator: char, octets: usize| {
        let mut groups = 0;
        let fine = text.split(separator).all(|group| {
            groups += 1;
            group.len() == 2 * octets && group.bytes().all(|byte| byte.is_ascii_hexdigit())
        });
        fine && OCTETS.contains(&(groups * octets))
    };
    grouped(':', 1) || grouped('-', 1) || grouped('.', 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn octets_in_groups() {
        for text in ["02:00:00:00:00:aF", "02-00-00-00-00-01", "0200.0000.0001", "11:22:33:44:55:66:77:88"] {
            assert!(is_hardware_address(text), "{text}");
        }
        for text in
            ["", "zz", "02:00:00:00:00", "02:00:00:00:00:1", "02-00:00-00-00-01", "020000000001", "02:00:00:00:00:0g"]
        {
            assert!(!is_hardware_address(text), "{text}");
        }
    }
}
