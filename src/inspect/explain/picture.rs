//! `explain --format svg`: draws one row for each kind of traffic, from its sender in the pod to the outside: captured
//! traffic through a port of the sidecar, traffic that bypasses the sidecar past it. `picture.svg` is the
//! head of the document: colors, as classes, and the heads of arrows.

use super::Explanation;
use super::exclusions::{ContainerTraffic, ExcludedContainer, ExcludedPart, application_containers, grouped};
use crate::firewall::DNS_PROXY_PORT;
use crate::inspect::elements::scope_text;
use crate::inspect::subject::Subject;
use crate::inspect::terminal::joined;
use crate::pod::Pod;
use crate::pod::well_known::{INIT_CONTAINER, PROXY_CONTAINER};
use crate::policy::{DnsCapture, Policy, Ports, Redirect, TrafficOwner};
use crate::printable::{cut, xml};
use crate::sub_plugins::bypasses_inbound;
use std::fmt::Write as _;
use std::net::IpAddr;

const WIDTH: usize = 1120;
const POD: usize = 28;
const POD_WIDTH: usize = 748;
const CARD: usize = POD + 22;
const CARD_WIDTH: usize = 236;
const CARD_HEIGHT: usize = 54;
const ROW: usize = CARD_HEIGHT + 14;
const SIDECAR: usize = 476;
const SIDECAR_WIDTH: usize = 270;
const OUTSIDE: usize = 876;
const OUTSIDE_WIDTH: usize = WIDTH - OUTSIDE - 28;
const TOP: usize = 96;
/// The height of a box's heading.
const HEAD: usize = 60;
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

/// A kind of traffic: its sender in the pod, and the arrow.
#[derive(Default)]
struct Row {
    name: String,
    detail: String,
    /// The class of the arrow: one of [`LEGEND`].
    color: &'static str,
    /// The port of the sidecar that it passes.
    port: Option<u16>,
    what: String,
    to: String,
    /// What requests the bypass, below the arrow; empty for captured traffic.
    sources: Vec<String>,
}

impl Row {
    /// Returns the row of traffic that bypasses the sidecar.
    fn new(name: impl Into<String>, detail: impl Into<String>, what: impl Into<String>, to: impl Into<String>) -> Self {
        let (name, detail, what, to) = (name.into(), detail.into(), what.into(), to.into());
        Self { name, detail, what, to, color: "free", ..Self::default() }
    }

    /// Returns the row of a container's traffic to everywhere.
    fn of_container(container: &ContainerTraffic<'_>, what: impl Into<String>) -> Self {
        let uid = container.uid().map_or_else(|| "unknown UID".to_owned(), |uid| format!("UID {uid}"));
        let detail = if container.ends_before { format!("init container, {uid}") } else { uid };
        Self::new(container.name(), detail, what, "anywhere")
    }
}

/// Draws an explanation as a self-contained SVG document.
#[must_use]
pub fn picture(subject: &Subject, explanation: &Explanation) -> String {
    let (pod, policy) = (&subject.facts.pod, &explanation.policy);
    let containers = application_containers(pod);
    let by_istio_init = !pod.host_network && pod.all_containers().any(|container| container.name == INIT_CONTAINER);
    let by_others = (policy.ambient || by_istio_init).then(|| captured_by_others(pod, policy));
    let redirect = policy.redirect().or(by_others.as_ref());
    let mut rows = match redirect {
        Some(redirect) => captured(explanation, redirect, &containers),
        None => containers.iter().map(|one| Row::of_container(one, "everything")).collect(),
    };
    if let Some(redirect) = redirect {
        let mut free = bypasses(explanation, redirect, &containers);
        let more = free.len().saturating_sub(MAX_BYPASSES);
        free.truncate(MAX_BYPASSES);
        rows.extend(free);
        rows.extend((more > 0).then(|| Row::new(format!("and {more} more"), "", "see detour explain --all", "")));
    }
    let mut drawing = Drawing::default();
    let title = format!("Pod {}", explanation.pod);
    drawing.text("title", (POD, 44), &title, 78);
    match &explanation.add_fails {
        Some(cause) => drawing.text("bad", (POD, 68), &format!("an ADD fails: {cause}"), MAX_TEXT),
        None => drawing.text("soft", (POD, 68), &explanation.decision, MAX_TEXT),
    }
    let height_of = |rows: usize| HEAD + ROW * rows;
    let height = height_of(rows.len()) + 8;
    for (x, width, heading) in [(POD, POD_WIDTH, "POD"), (OUTSIDE, OUTSIDE_WIDTH, "OUTSIDE")] {
        drawing.area("pod", (x, TOP), (width, height), 14);
        drawing.text("head", (x + 22, TOP + 26), heading, MAX_TEXT);
    }
    if let Some(redirect) = redirect {
        // The rows below the sidecar bypass it.
        let captured = rows.iter().filter(|row| row.port.is_some()).count();
        drawing.area("sidecar", (SIDECAR, TOP + 8), (SIDECAR_WIDTH, height_of(captured) - 16), 12);
        let (proxy, kind) = match (policy.ambient, policy.redirect()) {
            (true, _) => ("ztunnel".to_owned(), "ambient mesh"),
            (false, None) => (PROXY_CONTAINER.to_owned(), "captured by istio-init"),
            _ if pod.is_init_container(PROXY_CONTAINER) => (proxy(redirect), "native sidecar"),
            _ => (proxy(redirect), "not a native sidecar"),
        };
        let middle = SIDECAR + SIDECAR_WIDTH / 2;
        drawing.text("name mid", (middle, TOP + 28), &proxy, 36);
        drawing.text("soft mid", (middle, TOP + 46), kind, MAX_TEXT);
    }
    for (row, y) in rows.iter().zip((TOP + HEAD..).step_by(ROW)) {
        drawing.row(row, y);
    }
    let bottom = TOP + height + 34;
    let mut x = POD;
    for (color, meaning) in LEGEND.into_iter().filter(|(color, _)| rows.iter().any(|row| row.color == *color)) {
        drawing.arrow(color, bottom, x, x + 34);
        drawing.text("soft", (x + 42, bottom + 4), meaning, MAX_TEXT);
        x += 76 + 7 * meaning.len();
    }
    let head = include_str!("picture.svg").replace("WIDTH", &WIDTH.to_string());
    let head = head.replace("HEIGHT", &(bottom + 36).to_string());
    format!("{head}<title>{}</title>\n{}</svg>\n", xml(&format!("{title}: {}", explanation.decision)), drawing.body)
}

/// Returns what ztunnel, or the redirection by `istio-init`, captures, in the form of a redirection of this program.
fn captured_by_others(pod: &Pod, policy: &Policy) -> Redirect {
    let captures_dns = policy.dns_captured_elsewhere.unwrap_or(policy.ambient);
    Redirect {
        inbound_ports_include: if bypasses_inbound(pod) { Ports::List(Vec::new()) } else { Ports::All },
        inbound_ports_exclude: Ports::List(Vec::new()),
        dns: if captures_dns { DnsCapture::All } else { DnsCapture::Off },
        ..Redirect::default()
    }
}

fn proxy(redirect: &Redirect) -> String {
    match redirect.proxy_uid.is_empty() {
        false => format!("{PROXY_CONTAINER}, UID {}", joined(&redirect.proxy_uid)),
        true => format!("{PROXY_CONTAINER}, GID {}", joined(&redirect.proxy_gid)),
    }
}

/// Returns the rows of traffic that passes the sidecar.
fn captured(explanation: &Explanation, redirect: &Redirect, containers: &[ContainerTraffic<'_>]) -> Vec<Row> {
    let policy = &explanation.policy;
    let through = |color, port, row| Row { port: Some(port), color, ..row };
    let inbound = match (&redirect.inbound_ports_include, &redirect.inbound_ports_exclude) {
        (Ports::List(included), _) if included.is_empty() => None,
        (Ports::List(included), _) => Some(format!("inbound to {}", joined(included))),
        (Ports::All, Ports::List(excluded)) if excluded.is_empty() => Some("inbound".to_owned()),
        (Ports::All, Ports::List(excluded)) => Some(format!("inbound, except {}", joined(excluded))),
        (Ports::All, Ports::All) => None,
    };
    let inbound = inbound.map(|what| {
        through("in", redirect.inbound_capture_port, Row::new("every container", "receives", what, "callers"))
    });
    let mut rows: Vec<Row> = inbound.into_iter().collect();
    let is_captured = |container: &&ContainerTraffic<'_>| {
        redirect.captures_outbound() && container.excluded_part(policy) != ExcludedPart::All
    };
    for container in containers.iter().filter(is_captured) {
        let is_lost = explanation.init_containers.iter().any(|one| one.is_lost() && one.name == container.name());
        let (color, to) = if is_lost { ("lost", "lost: no sidecar yet") } else { ("out", "services") };
        let row = Row { to: to.to_owned(), ..Row::of_container(container, "outbound TCP") };
        rows.push(through(color, redirect.proxy_port, row));
    }
    let resolvers = match &redirect.dns {
        DnsCapture::Off => return rows,
        DnsCapture::All => "every resolver".to_owned(),
        DnsCapture::Servers { v4, v6 } => {
            joined(v4.iter().copied().map(IpAddr::V4).chain(v6.iter().copied().map(IpAddr::V6)))
        }
    };
    rows.push(through("dns", DNS_PROXY_PORT, Row::new("every process", "not excluded", "DNS", resolvers)));
    rows
}

/// Returns the rows of outbound traffic that bypasses the sidecar, as the report lists it.
fn bypasses(explanation: &Explanation, redirect: &Redirect, containers: &[ContainerTraffic<'_>]) -> Vec<Row> {
    let policy = &explanation.policy;
    let excluded = grouped(&explanation.exclusions);
    let outbound = excluded.iter().filter(|excluded| excluded.direction != "inbound");
    let of_traffic = outbound.map(|one| {
        let owned =
            |container: &&ContainerTraffic<'_>| one.owner != TrafficOwner::Any && container.is_owned_by(one.owner);
        let owners = || joined(containers.iter().filter(owned).map(ContainerTraffic::name));
        let (who, detail) = (one.who.replace("uid ", "UID "), one.note.clone().unwrap_or_else(owners));
        Row { sources: one.sources.clone(), ..Row::new(who, detail, one.traffic(), &one.to) }
    });
    let is_proxys = |one: &&ContainerTraffic<'_>| one.proxys_id(policy).is_some() && !one.is_excluded_by_id(policy);
    let sources = vec!["the UID or GID of istio-proxy".to_owned()];
    let of_proxy = |one| Row { sources: sources.clone(), ..Row::of_container(one, "everything") };
    let of_proxy = containers.iter().filter(is_proxys).map(of_proxy);
    let dns = (redirect.dns == DnsCapture::Off)
        .then(|| Row::new("every process", "DNS is not captured", "udp port 53", "resolvers"));
    let named = |one: &ExcludedContainer| {
        let container = containers.iter().find(|container| container.name() == one.name)?;
        let what = format!("{} until it exits", scope_text(one.scope));
        Some(Row { sources: one.sources.clone(), ..Row::of_container(container, what) })
    };
    of_traffic.chain(of_proxy).chain(dns).chain(explanation.excluded_containers.iter().filter_map(named)).collect()
}

/// The elements of an SVG document, in pixels from the upper left corner.
#[derive(Debug, Default)]
struct Drawing {
    body: String,
}

impl Drawing {
    /// Adds a row: the sender, an arrow through or past the sidecar, and the destination. Inbound traffic arrives from there.
    fn row(&mut self, row: &Row, y: usize) {
        let Row { name, detail, color, port, what, to, sources } = row;
        self.area("card", (CARD, y), (CARD_WIDTH, CARD_HEIGHT), 9);
        self.text("name", (CARD + 14, y + 23), name, 25);
        self.text("soft", (CARD + 14, y + 42), detail, 31);
        let middle = y + CARD_HEIGHT / 2;
        let (start, end) = (CARD + CARD_WIDTH, OUTSIDE + 16);
        let (from, to_x) = if *color == "in" { (end, start) } else { (start, end) };
        self.arrow(color, middle, from, to_x);
        let (center, limit) = match port {
            Some(_) => (SIDECAR + SIDECAR_WIDTH / 2 + 10, 36),
            None => ((start + POD + POD_WIDTH) / 2, 46),
        };
        self.text("tagged mid", (center, middle - 8), what, limit);
        // There is space for two lines.
        let (first, others) = sources.split_at(sources.len().min(1));
        self.text("soft mid", (center, middle + 18), &first.join(""), 74);
        self.text("soft mid", (center, middle + 32), &others.join("; "), 74);
        if let Some(port) = port {
            self.area(&format!("f-{color}"), (SIDECAR - 27, middle - 11), (54, 22), 11);
            self.text("port", (SIDECAR, middle + 4), &port.to_string(), MAX_TEXT);
        }
        self.text("soft", (OUTSIDE + 24, middle + 4), to, 26);
    }

    /// Adds a box with round corners.
    fn area(&mut self, class: &str, (x, y): (usize, usize), (width, height): (usize, usize), radius: usize) {
        let _ = writeln!(
            self.body,
            r#"<rect class="{class}" x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}"/>"#
        );
    }

    /// Adds a line of text, at the beginning or, with class `mid`, the middle of its baseline. It is shortened to `limit`
    /// bytes; a tooltip shows the whole text.
    fn text(&mut self, class: &str, (x, y): (usize, usize), text: &str, limit: usize) {
        if text.is_empty() {
            return;
        }
        let shown = cut(text, limit);
        let title = if shown == text { String::new() } else { format!("<title>{}</title>", xml(text)) };
        let _ = writeln!(self.body, r#"<text class="{class}" x="{x}" y="{y}">{}{title}</text>"#, xml(&shown));
    }

    /// Adds a horizontal arrow in the color of one of [`LEGEND`].
    fn arrow(&mut self, color: &str, y: usize, from: usize, to: usize) {
        let _ =
            writeln!(self.body, r#"<path class="way {color}" d="M{from} {y}H{to}" marker-end="url(#to-{color})"/>"#);
    }
}
