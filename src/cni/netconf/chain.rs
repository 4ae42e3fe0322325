//! The sub-plugins of a configuration: those that it lists, or those that its type stands for.

use crate::cni::list::wrong_type;
use crate::cni::{Block, BlockReader, Code, Error, at_most};
use serde_json::{Value, json};

/// The types of blocks that are not an executable's.
pub const SUB_PLUGINS: [&str; 3] = ["istio-redirect", "uid-exclude", "dns-exclude"];

/// The most blocks of a chain.
const MOST_BLOCKS: usize = 32;
const TYPES: &str = "detour, istio-cni, excludedns";

/// `type`, or the name under which the binary was started where there is none.
pub(in crate::cni) fn kind(reader: &BlockReader<'_>, program: &str) -> Result<String, Error> {
    if let Some(kind) = super::text(reader, "type")? {
        return Ok(kind.to_owned());
    }
    if default_chain(program).is_some() {
        return Ok(program.to_owned());
    }
    let msg = format!("type: it is missing, and the binary's name, {program:?}, is none of {TYPES}");
    Err(Error::new(Code::InvalidConfig, msg))
}

/// `chain`, or what `kind` stands for.
pub(super) fn chain(reader: &BlockReader<'_>, kind: &str) -> Result<Vec<Block>, Error> {
    let blocks: Vec<Block> = match reader.value("chain") {
        Some(Value::Array(items)) => {
            at_most(MOST_BLOCKS, "sub-plugins and executables", "chain", items.len())?;
            let block = |(i, item)| Block::new(format!("chain[{i}]"), item);
            items.iter().enumerate().map(block).collect::<Result<_, _>>()?
        }
        Some(other) => return Err(wrong_type("chain", other, "an array of objects")),
        None => {
            let refused = || wrong_type("type", &Value::from(kind), &format!("{TYPES}; any other needs a chain"));
            return default_chain(kind).ok_or_else(refused);
        }
    };
    blocks.iter().try_for_each(check_type)?;
    Ok(blocks)
}

/// A type that is no sub-plugin's is looked for in `CNI_PATH`, and must stay there.
fn check_type(block: &Block) -> Result<(), Error> {
    let place = format!("{}.type", block.path);
    let accepted = format!("{}, or an executable's name without /", SUB_PLUGINS.join(", "));
    match block.keys.get("type") {
        Some(Value::String(kind)) if !kind.is_empty() && !kind.contains('/') => Ok(()),
        Some(other) => Err(wrong_type(&place, other, &accepted)),
        None => Err(Error::new(Code::InvalidConfig, format!("{place}: it is missing; accepted: {accepted}"))),
    }
}

/// What a type stands for where nothing is listed.
pub(in crate::cni) fn default_chain(kind: &str) -> Option<Vec<Block>> {
    let blocks = match kind {
        "detour" => {
            vec![json!({"type": "istio-redirect"}), json!({"type": "uid-exclude"}), json!({"type": "dns-exclude"})]
        }
        "istio-cni" => vec![json!({"type": "istio-redirect"})],
        "excludedns" => {
            vec![json!({"type": "uid-exclude", "uids": ["1337"]}), json!({"type": "dns-exclude", "uids": ["1337"]})]
        }
        _ => return None,
    };
    let path = |i| format!("default chain of type {kind}[{i}]");
    blocks.iter().enumerate().map(|(i, block)| Block::new(path(i), block).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(conf: &Value, program: &str) -> Result<(String, Vec<Block>), Error> {
        let top = Block::new("", conf).expect("an object");
        let kind = kind(&top.reader(), program)?;
        chain(&top.reader(), &kind).map(|blocks| (kind, blocks))
    }

    fn types(conf: &Value, program: &str) -> Vec<String> {
        let (_, blocks) = read(conf, program).expect("accepted");
        blocks.iter().map(|b| b.keys["type"].as_str().expect("a string").to_owned()).collect()
    }

    #[test]
    fn a_type_stands_for_a_chain() {
        assert_eq!(types(&json!({"type": "istio-cni"}), "x"), ["istio-redirect"]);
        assert_eq!(types(&json!({"type": "detour"}), "x"), ["istio-redirect", "uid-exclude", "dns-exclude"]);
        let (_, blocks) = read(&json!({"type": "excludedns"}), "x").expect("accepted");
        assert_eq!(Value::Object(blocks[0].keys.clone()), json!({"type": "uid-exclude", "uids": ["1337"]}));
        assert_eq!(Value::Object(blocks[1].keys.clone()), json!({"type": "dns-exclude", "uids": ["1337"]}));
    }

    #[test]
    fn the_binarys_name_counts_only_without_a_type() {
        assert_eq!(types(&json!({}), "istio-cni"), ["istio-redirect"]);
        assert_eq!(types(&json!({"type": ""}), "istio-cni"), ["istio-redirect"]);
        assert_eq!(types(&json!({"type": "istio-cni"}), "excludedns"), ["istio-redirect"]);
        let error = read(&json!({}), "renamed").expect_err("refused");
        assert!(error.msg.starts_with("type: ") && error.msg.contains(r#""renamed""#), "{error}");
    }

    #[test]
    fn a_chain_is_taken_as_it_is() {
        let chain = json!([{"type": "uid-exclude", "uids": [7]}, {"type": "my-plugin", "x": {}}]);
        let (kind, blocks) = read(&json!({"type": "v2-5-istio-cni", "chain": chain}), "x").expect("accepted");
        assert_eq!(kind, "v2-5-istio-cni");
        assert_eq!(blocks.iter().map(|b| b.path.as_str()).collect::<Vec<_>>(), ["chain[0]", "chain[1]"]);
        assert_eq!(Value::Object(blocks[1].keys.clone()), chain[1]);
        assert!(types(&json!({"type": "detour", "chain": []}), "x").is_empty());
    }

    #[test]
    fn errors_name_the_place() {
        for (conf, place) in [
            (json!({"type": "flannel"}), r#"type: "flannel" is not accepted"#),
            (json!({"type": 7}), "type: 7 is not accepted"),
            (json!({"type": "detour", "chain": {}}), "chain: {} is not accepted"),
            (json!({"type": "detour", "chain": ["x"]}), r#"chain[0]: "x" is not accepted"#),
            (json!({"type": "detour", "chain": [{"type": "a"}, {}]}), "chain[1].type: it is missing"),
            (json!({"type": "detour", "chain": [{"type": "../sh"}]}), r#"chain[0].type: "../sh" is not accepted"#),
            (json!({"type": "detour", "chain": [{"type": ""}]}), r#"chain[0].type: "" is not accepted"#),
            (json!({"type": "detour", "chain": [{"type": 7}]}), "chain[0].type: 7 is not accepted"),
        ] {
            let error = read(&conf, "x").expect_err("refused");
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(error.msg.starts_with(place) && error.msg.contains("; accepted: "), "{error}");
        }
    }
}
