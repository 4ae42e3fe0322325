//! `explain --format svg`: draws one row for each kind of traffic, from its sender in the pod to the outside: captured
//! traffic through a port of the sidecar, traffic that bypasses the sidecar past it. Colors are classes in `picture.css`.

use super::evaluation::captured_by_ztunnel;
use super::exclusions::{
    ContainerTraffic, ExcludedContainer, ExcludedPart, ExcludedTraffic, application_containers, grouped,
};
use super::report::{Explained, ExplainedRequest};
use crate::firewall::DNS_PROXY_PORT;
use crate::inspect::subject::Subject;
use crate::inspect::terminal::joined;
use crate::pod::well_known::{INIT_CONTAINER, PROXY_CONTAINER};
use crate::policy::{ContainerScope, DnsCapture, Policy, Ports, Redirect, TrafficOwner};
use crate::printable::xml;
use ipnet::IpNet;
use std::fmt::Write as _;

const WIDTH: i32 = 1120;
const POD: i32 = 28;
const POD_WIDTH: i32 = 748;
const CARD: i32 = POD + 22;
const CARD_WIDTH: i32 = 236;
const CARD_HEIGHT: i32 = 54;
const ROW: i32 = CARD_HEIGHT + 14;
const SIDECAR: i32 = 476;
const SIDECAR_WIDTH: i32 = 270;
const OUTSIDE: i32 = 876;
const OUTSIDE_WIDTH: i32 = WIDTH - OUTSIDE - 28;
const TOP: i32 = 96;
/// The height of a box's heading.
const HEAD: i32 = 60;
/// The height of a line of text, and the maximum number of lines about requests.
const LINE: i32 = 20;
const MAX_REQUESTS: usize = 20;
const ANYWHERE: &str = "anywhere";
/// The kinds of arrows, and their meanings.
const LEGEND: [(&str, &str); 5] = [
    ("out", "captured"),
    ("lost", "captured and lost"),
    ("dns", "captured DNS"),
    ("in", "inbound"),
    ("free", "bypass"),
];
/// The maximum number of characters in a line across the picture.
const MAX_TEXT: usize = 150;
/// The maximum number of rows of traffic that bypasses the sidecar.
const MAX_BYPASSES: usize = 24;

/// A kind of traffic.
struct Row {
    card: Card,
    /// The class of the arrow: one of [`LEGEND`].
    color: &'static str,
    /// The port of the sidecar that it passes.
    port: Option<u16>,
    what: String,
    to: String,
    /// What requests the bypass, below the arrow; empty for captured traffic.
    sources: Vec<String>,
}

/// The sender of traffic in the pod.
struct Card {
    name: String,
    detail: String,
    ends_before: bool,
}

/// Draws an explanation as a self-contained SVG document.
#[must_use]
pub fn picture(subject: &Subject, explained: &Explained) -> String {
    let policy = &explained.policy;
    let containers = application_containers(&subject.facts.pod);
    let excluded = &explained.explanation.excluded_containers;
    let mut rows = Vec::new();
    let to_ztunnel = policy.ambient.then(|| captured_by_ztunnel(&subject.facts.pod, policy));
    let redirect = policy.redirect().or(to_ztunnel.as_ref());
    match redirect {
        Some(redirect) => {
            rows.extend(captured(redirect, policy, &containers));
            let mut free = bypasses(explained, redirect, &containers);
            free.extend(containers.iter().flat_map(|container| rows_of_container(excluded, container)));
            let more = free.len().saturating_sub(MAX_BYPASSES);
            free.truncate(MAX_BYPASSES);
            rows.extend(free);
            if more > 0 {
                let card = Card { name: format!("and {more} more"), detail: String::new(), ends_before: false };
                rows.push(bypass(card, "see detour explain --all".to_owned(), String::new(), &[]));
            }
        }
        None => rows.extend(containers.iter().flat_map(|c| rows_without_redirect(subject, explained, c))),
    }
    let mut drawing = Drawing::default();
    let title = format!("Pod {}", explained.explanation.pod);
    drawing.text("title", (POD, 44), &title, 78);
    match &explained.explanation.add_fails {
        Some(cause) => drawing.text("bad", (POD, 68), &format!("an ADD fails: {cause}"), MAX_TEXT),
        None => drawing.text("soft", (POD, 68), &explained.explanation.decision, MAX_TEXT),
    }
    let height = HEAD + ROW * i32::try_from(rows.len()).unwrap_or_default() + 8;
    drawing.area("pod", (POD, TOP), (POD_WIDTH, height), 14);
    drawing.text("head", (CARD, TOP + 26), "POD", MAX_TEXT);
    drawing.area("pod", (OUTSIDE, TOP), (OUTSIDE_WIDTH, height), 14);
    drawing.text("head", (OUTSIDE + 22, TOP + 26), "OUTSIDE", MAX_TEXT);
    if let Some(redirect) = redirect {
        // The rows below the sidecar bypass it.
        let captured = rows.iter().filter(|row| row.port.is_some()).count();
        let height = HEAD + ROW * i32::try_from(captured).unwrap_or_default() - 16;
        drawing.area("sidecar", (SIDECAR, TOP + 8), (SIDECAR_WIDTH, height), 12);
        let middle = SIDECAR + SIDECAR_WIDTH / 2;
        let (proxy, kind) = if policy.ambient {
            ("ztunnel".to_owned(), "ambient mesh")
        } else {
            let is_native = subject.facts.pod.is_init_container(PROXY_CONTAINER);
            (proxy(redirect), if is_native { "native sidecar" } else { "not a native sidecar" })
        };
        drawing.text("name mid", (middle, TOP + 28), &proxy, 36);
        drawing.text("soft mid", (middle, TOP + 46), kind, MAX_TEXT);
    }
    for (row, y) in rows.iter().zip((TOP + HEAD..).step_by(usize::try_from(ROW).unwrap_or(1))) {
        drawing.row(row, y);
    }
    let bottom = TOP + height + 34;
    let mut x = POD;
    for (color, meaning) in LEGEND.into_iter().filter(|(color, _)| rows.iter().any(|row| row.color == *color)) {
        drawing.arrow(color, (x, bottom), (x + 34, bottom));
        drawing.text("soft", (x + 42, bottom + 4), meaning, MAX_TEXT);
        x += 76 + 7 * i32::try_from(meaning.len()).unwrap_or_default();
    }
    let requests = &explained.explanation.requests;
    let request = |one: &ExplainedRequest| format!("{:?} ({}): {}", one.item, one.source, one.verdict());
    let more = requests.len().saturating_sub(MAX_REQUESTS);
    let more = (more > 0).then(|| format!("and {more} more requests"));
    let mut line = bottom;
    for text in requests.iter().take(MAX_REQUESTS).map(request).chain(more) {
        line += LINE;
        drawing.text("soft", (POD, line + 12), &text, MAX_TEXT);
    }
    drawing.finish(&format!("{title}: {}", explained.explanation.decision), WIDTH, line + 36)
}

fn proxy(redirect: &Redirect) -> String {
    match redirect.proxy_uid.is_empty() {
        false => format!("istio-proxy, UID {}", joined(&redirect.proxy_uid)),
        true => format!("istio-proxy, GID {}", joined(&redirect.proxy_gid)),
    }
}

/// Returns the rows of traffic that passes the sidecar.
fn captured(redirect: &Redirect, policy: &Policy, containers: &[ContainerTraffic<'_>]) -> Vec<Row> {
    let mut rows = Vec::new();
    let inbound = match &redirect.inbound_ports_include {
        Ports::List(included) if included.is_empty() => None,
        Ports::List(included) => Some(format!("inbound to {}", joined(included))),
        Ports::All => Some(match ports(&redirect.inbound_ports_exclude) {
            Some(excluded) => format!("inbound, except {excluded}"),
            None => "inbound".to_owned(),
        }),
    };
    if let Some(what) = inbound {
        let (card, port) = (every("container", "receives"), redirect.inbound_capture_port);
        rows.push(through(card, "in", port, what, "callers".to_owned()));
    }
    for container in containers.iter().filter(|container| container.excluded_part(policy) != ExcludedPart::All) {
        // ztunnel runs before all containers of the pod.
        let (color, to) = match policy.ambient || container.runs_with_proxy() {
            true => ("out", "services"),
            false => ("lost", "lost: no sidecar yet"),
        };
        rows.push(through(card(container), color, redirect.proxy_port, "outbound TCP".to_owned(), to.to_owned()));
    }
    let resolvers = match &redirect.dns {
        DnsCapture::Off => return rows,
        DnsCapture::All => "every resolver".to_owned(),
        DnsCapture::Servers { v4, v6 } => {
            joined(v4.iter().map(ToString::to_string).chain(v6.iter().map(ToString::to_string)))
        }
    };
    let card = every("process", "not excluded");
    rows.push(through(card, "dns", DNS_PROXY_PORT, "DNS".to_owned(), resolvers));
    rows
}

fn card(container: &ContainerTraffic<'_>) -> Card {
    let uid = container.uid().map_or_else(|| "unknown UID".to_owned(), |uid| format!("UID {uid}"));
    let detail = if container.ends_before { format!("init container, {uid}") } else { uid };
    Card { name: container.name().to_owned(), detail, ends_before: container.ends_before }
}

fn every(who: &str, detail: &str) -> Card {
    Card { name: format!("every {who}"), detail: detail.to_owned(), ends_before: false }
}

fn through(card: Card, color: &'static str, port: u16, what: String, to: String) -> Row {
    Row { card, color, port: Some(port), what, to, sources: Vec::new() }
}

fn bypass(card: Card, what: String, to: String, sources: &[String]) -> Row {
    Row { card, color: "free", port: None, what, to, sources: sources.iter().map(|source| in_words(source)).collect() }
}

/// Returns a source of the report as a caption.
fn in_words(source: &str) -> String {
    match source.split_once(", ") {
        Some(("pod", annotation)) => format!("set by the pod's annotation {annotation}"),
        Some(("namespace", annotation)) => format!("set by the namespace's annotation {annotation}"),
        Some((place, key)) => format!("set by the {place} ({key})"),
        None => source.to_owned(),
    }
}

/// Returns the rows of a container that this configuration does not redirect. Exclusions also apply to istio-init's
/// redirection.
fn rows_without_redirect(subject: &Subject, explained: &Explained, traffic: &ContainerTraffic<'_>) -> Vec<Row> {
    let pod = &subject.facts.pod;
    let by_istio_init = !pod.host_network && pod.all_containers().any(|container| container.name == INIT_CONTAINER);
    let row = bypass(card(traffic), "everything".to_owned(), ANYWHERE.to_owned(), &[]);
    let by_name = rows_of_container(&explained.explanation.excluded_containers, traffic);
    match traffic.excluded_part(&explained.policy) {
        _ if !by_istio_init => return vec![row],
        ExcludedPart::All if by_name.is_empty() => return vec![row],
        ExcludedPart::All => return by_name,
        ExcludedPart::Some | ExcludedPart::None => {}
    }
    let what = "captured by istio-init".to_owned();
    let captured = Row { color: "out", what, to: "through the sidecar".to_owned(), ..row };
    [captured].into_iter().chain(by_name).collect()
}

/// Returns the rows for exclusions and for settings that let outbound traffic bypass the sidecar.
fn bypasses(explained: &Explained, redirect: &Redirect, containers: &[ContainerTraffic<'_>]) -> Vec<Row> {
    let excluded = grouped(&explained.explanation.exclusions);
    let outbound = excluded.iter().filter(|excluded| excluded.direction != "inbound");
    let mut rows: Vec<Row> = outbound.map(|excluded| row_of_traffic(excluded, containers)).collect();
    let as_proxy = |container: &&ContainerTraffic<'_>| {
        container.proxys_id(&explained.policy).is_some() && !container.is_excluded_by_id(&explained.policy)
    };
    let source = ["the UID or GID of istio-proxy".to_owned()];
    let of_proxy = |container| bypass(card(container), "everything".to_owned(), ANYWHERE.to_owned(), &source);
    rows.extend(containers.iter().filter(as_proxy).map(of_proxy));
    if redirect.dns == DnsCapture::Off {
        let card = every("process", "DNS is not captured");
        let sources = explained.explanation.settings.iter().find(|setting| setting.key == "redirect_dns");
        let sources = sources.map_or(&[][..], |setting| &setting.sources);
        rows.push(bypass(card, "UDP port 53".to_owned(), "resolvers".to_owned(), sources));
    }
    rows
}

fn row_of_traffic(excluded: &ExcludedTraffic, containers: &[ContainerTraffic<'_>]) -> Row {
    let owned = (excluded.owner != TrafficOwner::Any).then(|| {
        let owned = containers.iter().filter(|container| container.is_owned_by(excluded.owner));
        joined(owned.map(ContainerTraffic::name))
    });
    let detail = match owned {
        Some(names) if names.is_empty() => "no container has this ID".to_owned(),
        Some(names) => names,
        None => String::new(),
    };
    let protocol = excluded.protocol.replace("tcp", "TCP").replace("udp", "UDP");
    let what = match (protocol.as_str(), excluded.ports.as_slice()) {
        (_, []) => protocol,
        // Only these protocols have ports.
        ("everything", ports) => format!("TCP and UDP to {}", to_ports(ports)),
        (_, ports) => format!("{protocol} to {}", to_ports(ports)),
    };
    let name = excluded.who.replace("uid ", "UID ").replace("gid ", "GID ");
    bypass(Card { name, detail, ends_before: false }, what, without_full_prefix(&excluded.to), &excluded.sources)
}

/// Returns a single address without its prefix length, and any other text as it is.
fn without_full_prefix(to: &str) -> String {
    match to.parse::<IpNet>() {
        Ok(range) if range.prefix_len() == range.max_prefix_len() => range.addr().to_string(),
        _ => to.to_owned(),
    }
}

fn to_ports(ports: &[String]) -> String {
    match ports {
        [one] if one == "53" => "port 53 (DNS)".to_owned(),
        [one] => format!("port {one}"),
        several => format!("ports {}", several.join(", ")),
    }
}

/// Returns the rows of a container that is excluded by its name.
fn rows_of_container(excluded: &[ExcludedContainer], container: &ContainerTraffic<'_>) -> Vec<Row> {
    let row = |one: &ExcludedContainer| {
        let (what, to) = match one.scope {
            ContainerScope::All => ("everything", ANYWHERE),
            ContainerScope::Dns => ("DNS", "resolvers"),
        };
        bypass(card(container), format!("{what} until it exits"), to.to_owned(), &one.sources)
    };
    excluded.iter().filter(|one| one.name == container.name()).map(row).collect()
}

fn ports(ports: &Ports) -> Option<String> {
    match ports {
        Ports::All => Some("*".to_owned()),
        Ports::List(ranges) => (!ranges.is_empty()).then(|| joined(ranges)),
    }
}

/// An SVG document in progress, in pixels from the upper left corner.
#[derive(Debug, Default)]
struct Drawing {
    body: String,
}

impl Drawing {
    /// Adds a row: the sender, an arrow through or past the sidecar, and the destination. Inbound traffic arrives from there.
    fn row(&mut self, Row { card, color, port, what, to, sources }: &Row, y: i32) {
        let class = if card.ends_before { "card ends" } else { "card" };
        self.area(class, (CARD, y), (CARD_WIDTH, CARD_HEIGHT), 9);
        self.text("name", (CARD + 14, y + 23), &card.name, 25);
        self.text("soft", (CARD + 14, y + 42), &card.detail, 31);
        let middle = y + CARD_HEIGHT / 2;
        let (start, end) = ((CARD + CARD_WIDTH, middle), (OUTSIDE + 16, middle));
        match *color {
            "in" => self.arrow(color, end, start),
            _ => self.arrow(color, start, end),
        }
        let center = match port {
            Some(_) => SIDECAR + SIDECAR_WIDTH / 2 + 10,
            None => (CARD + CARD_WIDTH + POD + POD_WIDTH) / 2,
        };
        self.tag((center, middle), what, if port.is_some() { 33 } else { 46 });
        // There is space for two lines.
        let lines = match sources.as_slice() {
            [first, rest @ ..] if !rest.is_empty() => vec![first.clone(), rest.join("; ")],
            one => one.to_vec(),
        };
        for (line, y) in lines.iter().zip([middle + 23, middle + 37]) {
            self.text("soft mid", (center, y), line, 74);
        }
        port.iter().for_each(|port| self.port(color, SIDECAR, middle, *port));
        self.text("soft", (OUTSIDE + 24, middle + 4), to, 26);
    }

    /// Adds a box with round corners.
    fn area(&mut self, class: &str, (x, y): (i32, i32), (width, height): (i32, i32), radius: i32) {
        let _ = writeln!(
            self.body,
            r#"<rect class="{class}" x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}"/>"#
        );
    }

    /// Adds a line of text, at the beginning or, with class `mid`, the middle of its baseline. It is shortened to `limit`
    /// characters; a tooltip shows the whole text.
    fn text(&mut self, class: &str, (x, y): (i32, i32), text: &str, limit: usize) {
        let shown = shortened(text, limit);
        let title = if shown == text { String::new() } else { format!("<title>{}</title>", xml(text)) };
        let _ = writeln!(self.body, r#"<text class="{class}" x="{x}" y="{y}">{}{title}</text>"#, xml(&shown));
    }

    /// Adds an arrow in the color of one of [`LEGEND`].
    fn arrow(&mut self, color: &str, (x1, y1): (i32, i32), (x2, y2): (i32, i32)) {
        let bend = (x2 - x1) / 2;
        let (c1, c2) = (x1 + bend, x2 - bend);
        let _ = writeln!(
            self.body,
            r#"<path class="way {color}" d="M{x1} {y1}C{c1} {y1} {c2} {y2} {x2} {y2}" marker-end="url(#to-{color})"/>"#
        );
    }

    /// Adds a label on an arrow, centered, with at most `limit` characters.
    fn tag(&mut self, (x, y): (i32, i32), text: &str, limit: usize) {
        // The average width of a character of a proportional font at 12 px is less than 6.4 px.
        let width = 64 * i32::try_from(shortened(text, limit).chars().count()).unwrap_or_default() / 10 + 16;
        self.area("tag", (x - width / 2, y - 10), (width, 20), 10);
        self.text("tagged mid", (x, y + 4), text, limit);
    }

    /// Adds a port number in a rounded box.
    fn port(&mut self, color: &str, x: i32, y: i32, port: u16) {
        self.area(&format!("f-{color}"), (x - 27, y - 11), (54, 22), 11);
        self.text("port", (x, y + 4), &port.to_string(), MAX_TEXT);
    }

    /// Returns the document.
    fn finish(self, title: &str, width: i32, height: i32) -> String {
        let mut markers = String::new();
        for (color, _) in LEGEND {
            let _ = writeln!(
                markers,
                r#"<marker id="to-{color}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto-start-reverse"><path class="f-{color}" d="M0 1L10 5L0 9z"/></marker>"#
            );
        }
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
             height=\"{height}\" role=\"img\">\n<title>{}</title>\n<style>\n{}</style>\n<defs>\n{markers}</defs>\n\
             <rect class=\"paper\" width=\"{width}\" height=\"{height}\"/>\n{}</svg>\n",
            xml(title),
            include_str!("picture.css"),
            self.body
        )
    }
}

/// Shortens text to at most `width` characters.
fn shortened(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_shortened() {
        assert_eq!((shortened("abcd", 4).as_str(), shortened("abcde", 4).as_str()), ("abcd", "abc…"));
    }

    #[test]
    fn only_single_addresses_lose_their_prefix_length() {
        for (to, shown) in [
            ("10.96.0.10/32", "10.96.0.10"),
            ("2001:db8::1/128", "2001:db8::1"),
            ("2001:db8::/32", "2001:db8::/32"),
            ("10.20.0.0/16", "10.20.0.0/16"),
            (ANYWHERE, ANYWHERE),
        ] {
            assert_eq!(without_full_prefix(to), shown);
        }
    }
}
