//! Recognizes secrets: one pass over a line of text, and the list of keys of structured files whose values are harmless.

use crate::printable::REDACTED;
use serde_json::Value;

/// Parts of the names of secrets, in lower case, without separators.
const SECRET: [&str; 13] = [
    "authoritydata",
    "authorization",
    "bearer",
    "certificatedata",
    "cookie",
    "credential",
    "keydata",
    "passphrase",
    "passw",
    "secret",
    "session",
    "signature",
    "token",
];
/// Ends of the names of secrets.
const ENDS: [&str; 9] = ["key", "keys", "psk", "pwd", "pass", "pin", "jwt", "sig", "creds"];
/// Parts of harmless names that look like names of secrets.
const HARMLESS: [&str; 3] = ["unauth", "author", "bypass"];
/// Schemes of an Authorization header (RFC 7235), which a credential follows after a space.
const SCHEMES: [&str; 5] = ["bearer", "basic", "digest", "negotiate", "ntlm"];
/// Prefixes of tokens: a JSON Web Token (`{"` in base64url), a token of OpenShift.
const STARTS: [&str; 2] = ["eyj", "sha256~"];
/// The maximum length of a harmless run of letters and digits.
const MAX_RUN: usize = 15;
/// The maximum length of a harmless word with separators, and of a run without digits.
const MAX_WORD: usize = 23;
const MAX_NAME: usize = 39;

/// Returns the line without values that follow the name of a secret, and without credentials and tokens of known forms.
/// If `harmless` words are given, all other words that look random are removed as well.
pub(super) fn scan(line: &str, harmless: Option<&[String]>) -> String {
    let mut out = String::with_capacity(line.len());
    let mut rest = line;
    while let Some(first) = rest.chars().next() {
        if !is_word(first) {
            out.push(first);
            rest = &rest[first.len_utf8()..];
            continue;
        }
        let (word, behind) = rest.split_at(rest.find(|c| !is_word(c)).unwrap_or(rest.len()));
        let random = harmless.is_some_and(|harmless| is_random(word, harmless));
        out += if random || has_known_form(word) { REDACTED } else { word };
        let (before, secret) = value_behind(word, behind);
        out += &behind[..before];
        if secret > 0 {
            out += REDACTED;
        }
        rest = &behind[before + secret..];
    }
    out
}

const fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '+' | '/' | '~' | '%')
}

/// Returns how many bytes after a word are kept, and how many after those are the value of a secret.
fn value_behind(word: &str, behind: &str) -> (usize, usize) {
    let name = word.rsplit(['/', '+', '~', '%']).next().unwrap_or_default();
    let flat: String = name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect();
    if !is_secret(&flat) {
        return (0, 0);
    }
    // `"name": `, `name\":`, `name]=`
    let decorated = skip(behind, |c| matches!(c, '\\' | '"' | '\'' | '`' | ']' | ' ' | '\t'));
    let mark = behind[decorated..].chars().next().filter(|c| matches!(c, '=' | ':'));
    if let Some(mark) = mark {
        let start = decorated + skip(&behind[decorated..], |c| matches!(c, '=' | ':' | '>' | ' ' | '\t'));
        let value = &behind[start..];
        return quoted(behind, start).unwrap_or_else(|| {
            // The end of a header, of YAML or of a list is unknown.
            let is_word = mark == '=' && !value.starts_with(['[', '{', '(']);
            (start, if is_word { value.find(char::is_whitespace).unwrap_or(value.len()) } else { value.len() })
        });
    }
    if flat == "value" {
        return (0, 0);
    }
    let is_flag = word.starts_with('-');
    let blank = skip(behind, |c| matches!(c, ' ' | '\t'));
    // `"--password","…"`, `--password "…"`, `password "…"`
    let between = skip(behind, |c| matches!(c, '\\' | '"' | '\'' | ',' | ' ' | '\t'));
    if is_flag && between > blank {
        let quote = behind[..between].rfind([' ', ',']).map_or(0, |at| at + 1);
        return quoted(behind, quote).unwrap_or((between, word_end(&behind[between..])));
    }
    if blank == 0 {
        return (0, 0);
    }
    if let Some(found) = quoted(behind, blank).filter(|_| contains_secret(&flat)) {
        return found;
    }
    let value = &behind[blank..];
    let end = word_end(value);
    let is_value = match value.chars().next() {
        Some('-') | None => false,
        Some(_) if is_flag || flat == "bearer" => true,
        // Prose, as in `the token is expired`, has no digits or capitals.
        Some(_) => value[..end].contains(|c: char| !c.is_ascii_lowercase() && !matches!(c, '.' | ';' | ':' | ')')),
    };
    if is_value { (blank, end) } else { (0, 0) }
}

/// Returns the quoted value that begins at `start`; the quotes may be escaped, as in a string within a string.
fn quoted(text: &str, start: usize) -> Option<(usize, usize)> {
    let level = skip(&text[start..], |c| c == '\\');
    let quote = text[start + level..].chars().next().filter(|c| matches!(c, '"' | '\'' | '`'))?;
    let open = start + level + quote.len_utf8();
    Some((open, closing(&text[open..], quote, level)))
}

fn word_end(text: &str) -> usize {
    text.find(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | ',' | '\\')).unwrap_or(text.len())
}

fn contains_secret(flat: &str) -> bool {
    SECRET.iter().any(|part| flat.contains(part))
}

fn is_secret(flat: &str) -> bool {
    let is_harmless = HARMLESS.iter().any(|harmless| flat.starts_with(harmless));
    let of_name = flat.contains("auth") || ENDS.iter().any(|end| flat.ends_with(end));
    contains_secret(flat) || of_name && !is_harmless || flat == "value" || SCHEMES.contains(&flat)
}

/// Returns the length of the prefix of such characters.
fn skip(text: &str, which: impl Fn(char) -> bool) -> usize {
    text.len() - text.trim_start_matches(which).len()
}

/// Returns the length up to a quote with at most `level` backslashes before it, or up to the end.
fn closing(text: &str, quote: char, level: usize) -> usize {
    let mut backslashes = 0;
    for (at, c) in text.char_indices() {
        if c == quote && backslashes <= level {
            return at - backslashes;
        }
        backslashes = if c == '\\' { backslashes + 1 } else { 0 };
    }
    text.len()
}

fn has_known_form(word: &str) -> bool {
    let starts =
        |part: &str| STARTS.iter().any(|mark| part.get(..mark.len()).is_some_and(|s| s.eq_ignore_ascii_case(mark)));
    word.len() > 8 && word.split(['/', '%', '+']).any(starts)
}

/// Whether a word looks like a key, a hash or a token, rather than a name, a path or a time.
fn is_random(word: &str, harmless: &[String]) -> bool {
    if !looks_random(word) {
        return false;
    }
    let rest = harmless.iter().filter(|known| !known.is_empty()).fold(word.to_owned(), |w, known| w.replace(known, ""));
    looks_random(&rest)
}

fn looks_random(word: &str) -> bool {
    let count = |text: &str, which: fn(&char) -> bool| text.chars().filter(which).count();
    let run_is_random = |run: &str| {
        let (digits, upper) = (count(run, char::is_ascii_digit), count(run, char::is_ascii_uppercase));
        run.len() > MAX_RUN && digits > 0 || run.len() > MAX_NAME && upper > 1
    };
    let counts = (
        count(word, char::is_ascii_digit),
        count(word, char::is_ascii_uppercase),
        count(word, char::is_ascii_lowercase),
    );
    word.split(|c: char| !c.is_ascii_alphanumeric()).any(run_is_random)
        || word.len() > MAX_WORD && counts.0 > 0 && counts.1 > 1 && counts.2 > 1
}

/// Keys whose values are shown. All values below any other key are removed.
const OPEN: [&str; 7] = [
    // The plugin's configuration, and istio-cni's.
    "cniVersion cniVersions name type log_level plugin_log_level log_file kubernetes kubeconfig agent_socket
    manifests_dir exclude_namespaces cni_bin_dir timeout_seconds agent_namespace agent_pod_prefixes cluster_dns dialect
    delegate_timeout_seconds chain native_nftables pod_namespace cni_agent_run_dir ambient_enabled",
    // Sub-plugins, and the policy in a state file.
    "proxy_uid proxy_gid proxy_port inbound_capture_port inbound_tunnel_port inbound_interception_mode
    inbound_tproxy_mark inbound_tproxy_route_table inbound_ports_include inbound_ports_exclude outbound_ports_include
    outbound_ports_exclude outbound_ip_ranges_include outbound_ip_ranges_exclude owner_groups_include
    owner_groups_exclude reroute_virtual_interfaces exclude_interfaces capture_secondary_networks redirect_dns
    secondary_interfaces default_interfaces
    capture_all_dns dns_servers_v4 dns_servers_v6 drop_invalid dual_stack enable_ipv6 host_ipv4_loopback_cidr uids gids
    rules resolvers ports protocols pod_overrides containers scope until policy made tables hooks fixtures device inode
    netns ip6 ipv6 proxy_loopback routing mark table interception exclusions On Off All List Servers Any Uid Gid owner
    destination protocol first last v4 v6 dns_captured_elsewhere",
    // The primary plugin, as Multus.
    "clusterNetwork delegates defaultNetworks systemNamespaces multusNamespace confDir cniDir binDir
    namespaceIsolation globalNamespaces readinessindicatorfile readiness_timeout_seconds retryDeleteOnError
    in_process_types chain_types merge_addresses network_status capabilities daemonSocketDir auxiliaryCNIChainName
    logLevel logFile logToStderr logOptions maxAge maxSize maxBackups compress",
    // Plugin lists, and the plugins of the CNI project.
    "plugins disableCheck bridge master mode mtu vlan ipam subnet rangeStart rangeEnd range_start range_end range ranges
    gateway routes dst gw address addresses dns nameservers domain search options interface interfaces ifname mac sandbox
    ips version",
    // Kubeconfigs: the kind of a user's credential. Of `env`, only names, because `value` is not open.
    "current-context contexts clusters users user cluster context namespace server certificate-authority proxy-url
    tls-server-name tokenFile client-certificate client-key exec command apiVersion kind interactiveMode env
    auth-provider",
    // The inputs of an evaluation in a state file. `args` is not open: a kubeconfig has that key too.
    "inputs pod uid evaluated network blocks without_facts runtime_nameservers previous_nameservers",
    // The installation's record, and the own list.
    "installer role ours before aside program_version node network node_configuration copy_of source cni_conf_dir",
];
/// Keys of objects whose members have arbitrary names, such as paths.
const MAPS: [&str; 3] = ["files", "lists", "networks"];

/// Removes the values of all keys that are not known to be harmless. Keys, `true`, `false`, `null` and the number of
/// items stay.
pub(super) fn only_open(value: &mut Value) {
    match value {
        Value::Object(members) => {
            for (key, value) in members {
                if MAPS.contains(&key.as_str()) && value.is_object() {
                    value.as_object_mut().into_iter().flatten().for_each(|(_, value)| only_open(value));
                } else if is_open(key) {
                    only_open(value);
                } else {
                    close(value);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(only_open),
        _ => {}
    }
}

/// Whether the values of a key are shown.
pub(super) fn is_open(key: &str) -> bool {
    OPEN.iter().any(|keys| keys.split_whitespace().any(|open| open == key))
}

fn close(value: &mut Value) {
    match value {
        Value::Object(members) => members.iter_mut().for_each(|(_, value)| close(value)),
        Value::Array(items) => items.iter_mut().for_each(close),
        Value::Null | Value::Bool(_) => {}
        Value::Number(_) | Value::String(_) => *value = REDACTED.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_value_is_shown_only_below_known_keys() {
        let mut file = json!({
            "files": {"/a": {"role": "program", "before": {"text": ["s", 384]}}},
            "lists": "s", "chain": [{"type": "x", "own": {"type": "s"}}], "n": 1, "mtu": 2, "flag": true,
        });
        only_open(&mut file);
        let gone = REDACTED;
        let wanted = json!({
            "files": {"/a": {"role": "program", "before": {"text": [gone, gone]}}},
            "lists": gone, "chain": [{"type": "x", "own": {"type": gone}}], "n": gone, "mtu": 2, "flag": true,
        });
        assert_eq!(file, wanted);
    }
}
