//! What the container istio-proxy says of itself: Istio's injector writes its choices there.

use super::Note;
use super::ids::IdKind;
use super::parse_bool::parse_bool;
use super::settings::Settings;
use crate::cni::Error;
use crate::pod::{Container, Pod};

/// The variable that turns the proxy's own resolver on.
const DNS_CAPTURE: &str = "ISTIO_META_DNS_CAPTURE";

/// The variable that has packets dropped that connection tracking can't place.
const INVALID_DROP: &str = "INVALID_DROP";

/// The layer of settings. UID or GID 0 is none: under TPROXY the proxy is root with GID 1337,
/// and what root sends can't all be the proxy's.
pub(super) fn container_settings(pod: &Pod, proxy: &Container, notes: &mut Vec<Note>) -> Result<Settings, Error> {
    let id = |kind: IdKind| -> Result<_, Error> { Ok(kind.of(pod, proxy)?.filter(|id| *id != 0).map(|id| vec![id])) };
    Ok(Settings {
        proxy_uid: id(IdKind::User)?,
        proxy_gid: id(IdKind::Group)?,
        redirect_dns: boolean(proxy, DNS_CAPTURE, notes),
        drop_invalid: boolean(proxy, INVALID_DROP, notes),
        ..Settings::default()
    })
}

/// By what the container sets a key of `istio-redirect`.
pub(super) fn said_by(key: &str) -> &'static str {
    match key {
        "proxy_uid" => IdKind::User.key(),
        "proxy_gid" => IdKind::Group.key(),
        "redirect_dns" => DNS_CAPTURE,
        _ => INVALID_DROP,
    }
}

/// Whether the pod's sidecar answers DNS, whoever sends it there.
pub(super) fn captures_dns(pod: &Pod) -> bool {
    pod.proxy().and_then(|proxy| proxy.env(DNS_CAPTURE)).and_then(parse_bool) == Some(true)
}

/// A variable that is no boolean counts as false, as it does for Istio.
fn boolean(proxy: &Container, name: &str, notes: &mut Vec<Note>) -> Option<bool> {
    let text = proxy.env(name)?;
    let value = parse_bool(text);
    if value.is_none() {
        let msg = format!("{name} of container {} is {text:?}, not a boolean, and counts as false", proxy.name);
        notes.push(Note::warning(msg));
    }
    Some(value.unwrap_or(false))
}
