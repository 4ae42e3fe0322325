//! Certificates out of PEM text, and the base64 that kubeconfigs and PEM share.

use k8s_openapi::ByteString;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::Error;

/// A file of certificates is larger only by mistake: the system's own bundle has 150 in 220 KiB.
pub(super) const LARGEST: u64 = 1 << 20;

const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";

/// The bytes that `text` stands for; blanks and line ends don't count.
///
/// # Errors
/// It is not base64.
pub(in crate::cluster) fn base64(text: &str) -> Result<Vec<u8>, Error> {
    let text: String = text.split_ascii_whitespace().collect();
    Ok(ByteString::deserialize(text.into_deserializer())?.0)
}

/// The base64 of these bytes.
pub(super) fn to_base64(bytes: &[u8]) -> String {
    let encoded = serde_json::to_value(ByteString(bytes.to_owned()));
    encoded.ok().and_then(|text| text.as_str().map(str::to_owned)).unwrap_or_default()
}

/// The DER of each certificate in `text`; what stands around them is ignored (RFC 7468, section 2).
///
/// # Errors
/// A certificate's body is not base64.
pub(super) fn certificates(text: &str) -> Result<Vec<Vec<u8>>, Error> {
    let bodies = text.split(BEGIN).skip(1).filter_map(|rest| rest.split_once(END));
    bodies.map(|(body, _)| base64(body)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_are_found_between_other_text() {
        let text = format!("CN=a\n{BEGIN}\nAQ\n==\n{END}\nCN=b\r\n{BEGIN}\r\nAgM=\r\n{END}\r\n");
        assert_eq!(certificates(&text).expect("base64"), [vec![1], vec![2, 3]]);
        assert!(certificates("nothing").expect("nothing").is_empty());
        assert!(certificates(&format!("{BEGIN}\n!\n{END}")).is_err());
    }
}
