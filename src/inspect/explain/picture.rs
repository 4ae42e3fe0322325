//! `explain --format svg`: draws the pod with its containers, the sidecar's ports, the outside, and an arrow for each kind
//! of traffic.
//!
//! Captured traffic passes the sidecar in the upper part. Below, each kind of traffic that bypasses the sidecar has its own
//! lane. Colors are classes in `picture.css`.

use super::exemptions::{ContainerTraffic, ExcludedContainer, ExemptPart, application_containers, owner_text};
use super::report::Explained;
use crate::inspect::subject::Subject;
use crate::pod::well_known::INIT_CONTAINER;
use crate::policy::{
    BypassEnd, ContainerScope, DnsCapture, Exclusion, Policy, PortRange, Ports, Protocol, Ranges, Redirect,
    TrafficOwner,
};
use crate::printable::xml;
use std::fmt::{Display, Write as _};

const WIDTH: i32 = 1120;
const POD: i32 = 28;
const POD_WIDTH: i32 = 748;
const CARDS: i32 = POD + 22;
const CARD: (i32, i32) = (236, 54);
const STEP: i32 = CARD.1 + 14;
const SIDECAR: i32 = 476;
const SIDECAR_WIDTH: i32 = 236;
const OUTSIDE: i32 = 876;
const OUTSIDE_WIDTH: i32 = WIDTH - OUTSIDE - 28;
const TOP: i32 = 96;
const ANYWHERE: &str = "anywhere";
/// The height of a box's heading.
const HEAD: i32 = 44;
/// Limit for the lines of text at a port of the sidecar.
const MAX_LINES: usize = 3;
const LEGEND: [(&str, &str, i32); 4] =
    [("out", "captured", 0), ("dns", "captured DNS", 120), ("in", "inbound", 268), ("free", "bypass", 376)];

/// A box on the left: the sender of traffic.
struct Card {
    name: String,
    detail: String,
    ends_before: bool,
}

/// A kind of traffic that bypasses the sidecar, or that istio-init captures.
struct Lane {
    card: Card,
    /// The class of the arrow.
    color: &'static str,
    what: String,
    to: String,
}

/// Draws an explanation as a self-contained SVG document.
#[must_use]
pub fn picture(subject: &Subject, explained: &Explained) -> String {
    let policy = &explained.policy;
    let containers = application_containers(&subject.facts.pod);
    let excluded = &explained.explanation.excluded_containers;
    let redirect = policy.redirect();
    let (captured, lanes) = match redirect {
        Some(redirect) => {
            let captured = containers.iter().filter(|container| container.exempt_part(policy) != ExemptPart::All);
            let mut lanes = lanes(redirect, policy, &containers);
            lanes.extend(containers.iter().flat_map(|container| lanes_of_container(excluded, container)));
            (captured.map(card).collect(), lanes)
        }
        None => (Vec::new(), containers.iter().flat_map(|c| lanes_without_redirect(subject, explained, c)).collect()),
    };
    let mut drawing = Drawing::default();
    let title = format!("Pod {}", explained.explanation.pod);
    drawing.short_text("title", (POD, 44), &title, 78);
    drawing.text("soft", POD, 68, &explained.explanation.decision);
    let upper = redirect.map_or(0, |_| upper_height(captured.len()));
    let lower = i32::try_from(lanes.len()).unwrap_or_default() * STEP;
    let height = HEAD + upper + lower + 8;
    drawing.area("pod", Area { x: POD, y: TOP, width: POD_WIDTH, height }, 14);
    drawing.text("head", CARDS, TOP + 26, "POD");
    drawing.area("pod", Area { x: OUTSIDE, y: TOP, width: OUTSIDE_WIDTH, height }, 14);
    drawing.text("head", OUTSIDE + 22, TOP + 26, "OUTSIDE");
    if let Some(redirect) = redirect {
        draw_sidecar(&mut drawing, redirect, &captured, upper);
    }
    draw_lanes(&mut drawing, &lanes, TOP + HEAD + upper);
    let bottom = draw_footer(&mut drawing, explained, TOP + height + 34);
    drawing.finish(&format!("{title}: {}", explained.explanation.decision), WIDTH, bottom)
}

fn upper_height(cards: usize) -> i32 {
    (i32::try_from(cards).unwrap_or_default() * STEP).max(3 * STEP + 78) + 28
}

fn card(container: &ContainerTraffic<'_>) -> Card {
    let uid = container.uid().map_or_else(|| "unknown UID".to_owned(), |uid| format!("uid {uid}"));
    let detail = if container.ends_before { format!("init container, {uid}") } else { uid };
    Card { name: container.name().to_owned(), detail, ends_before: container.ends_before }
}

fn every_process(detail: &str) -> Card {
    Card { name: "every process".to_owned(), detail: detail.to_owned(), ends_before: false }
}

fn everything(card: Card) -> Lane {
    Lane { card, color: "free", what: "everything".to_owned(), to: ANYWHERE.to_owned() }
}

/// Returns the lanes of a container that this configuration does not redirect. Exclusions also apply to istio-init's
/// redirection.
fn lanes_without_redirect(subject: &Subject, explained: &Explained, traffic: &ContainerTraffic<'_>) -> Vec<Lane> {
    let pod = &subject.facts.pod;
    let by_istio_init = !pod.host_network && pod.all_containers().any(|container| container.name == INIT_CONTAINER);
    let lane = everything(card(traffic));
    let by_name = lanes_of_container(&explained.explanation.excluded_containers, traffic);
    match traffic.exempt_part(&explained.policy) {
        _ if !by_istio_init => return vec![lane],
        ExemptPart::All if by_name.is_empty() => return vec![lane],
        ExemptPart::All => return by_name,
        ExemptPart::Some | ExemptPart::None => {}
    }
    let what = "captured by istio-init".to_owned();
    let captured = Lane { color: "out", what, to: "through the sidecar".to_owned(), ..lane };
    [captured].into_iter().chain(by_name).collect()
}

/// Returns the lanes for exclusions and for settings that let traffic bypass the sidecar.
fn lanes(redirect: &Redirect, policy: &Policy, containers: &[ContainerTraffic<'_>]) -> Vec<Lane> {
    let mut lanes: Vec<Lane> = Vec::new();
    let exclusions = policy.exclusions_in_effect();
    for exclusion in &exclusions {
        let same = |other: &&Exclusion| Exclusion { protocol: exclusion.protocol, ..(*other).clone() } == *exclusion;
        let protocols: Vec<Protocol> = exclusions.iter().filter(same).filter_map(|e| e.protocol).collect();
        // Exclusions that differ only in the protocol share a lane.
        if protocols.first() == exclusion.protocol.as_ref() {
            lanes.push(lane(exclusion, &protocols, containers));
        }
    }
    let mut add = |setting: &str, what: String, to: String| {
        lanes.push(Lane { card: every_process(setting), color: "free", what, to });
    };
    if let Some(ports) = ports(&redirect.outbound_ports_exclude) {
        add("outbound_ports_exclude", format!("port {ports}"), ANYWHERE.to_owned());
    }
    if let Some(nets) = ranges(&redirect.outbound_ip_ranges_exclude) {
        add("outbound_ip_ranges_exclude", "TCP".to_owned(), nets);
    }
    if redirect.dns == DnsCapture::Off {
        add("redirect_dns", "UDP port 53".to_owned(), "resolvers".to_owned());
    }
    if redirect.outbound_ip_ranges_include != Ranges::All {
        let to = ranges(&redirect.outbound_ip_ranges_include)
            .map_or_else(|| ANYWHERE.to_owned(), |nets| format!("other than {nets}"));
        add("outbound_ip_ranges_include", "TCP".to_owned(), to);
    }
    lanes
}

/// Returns the lanes of a container that is excluded by its name, with the sources of each exclusion.
fn lanes_of_container(excluded: &[ExcludedContainer], container: &ContainerTraffic<'_>) -> Vec<Lane> {
    let starts_before_proxy = container.pod.starts_before_proxy(container.name());
    let takes_effect = |one: &&ExcludedContainer| {
        one.name == container.name() && (one.until == BypassEnd::ContainerExit || starts_before_proxy)
    };
    let lane = |one: &ExcludedContainer| {
        let end = match one.until == BypassEnd::ProxyReady && container.runs_with_proxy() {
            true => "until the proxy is ready",
            false => "until it exits",
        };
        let (what, to) = match one.scope {
            ContainerScope::All => ("everything", ANYWHERE),
            ContainerScope::Dns => ("DNS", "resolvers"),
        };
        let card = Card { detail: one.sources.join("; "), ..card(container) };
        Lane { card, color: "free", what: format!("{what} {end}"), to: to.to_owned() }
    };
    excluded.iter().filter(takes_effect).map(lane).collect()
}

fn lane(exclusion: &Exclusion, protocols: &[Protocol], containers: &[ContainerTraffic<'_>]) -> Lane {
    let owner = owner_text(exclusion.owner);
    let matching: Vec<&ContainerTraffic<'_>> =
        containers.iter().filter(|container| container.is_owned_by(exclusion.owner)).collect();
    let card = match matching.as_slice() {
        _ if exclusion.owner == TrafficOwner::Any => every_process("excluded"),
        [] => Card { name: owner, detail: "no container with this ID".to_owned(), ends_before: false },
        [one] => card(one),
        several => {
            let names: Vec<&str> = several.iter().map(|container| container.name()).collect();
            let detail = names.join(", ");
            Card { name: format!("{} containers, {owner}", names.len()), detail, ends_before: false }
        }
    };
    let mut what: Vec<String> = Vec::new();
    what.extend((!protocols.is_empty()).then(|| list(protocols).to_uppercase()));
    what.extend((!exclusion.ports.is_empty()).then(|| format!("port {}", list(&exclusion.ports))));
    if what.is_empty() {
        what.push("everything".to_owned());
    }
    let to = exclusion.destination.map_or_else(|| ANYWHERE.to_owned(), |net| net.to_string());
    Lane { card, color: "free", what: what.join(" "), to }
}

fn list<T: Display>(items: &[T]) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn ports(ports: &Ports) -> Option<String> {
    match ports {
        Ports::All => Some("*".to_owned()),
        Ports::List(ranges) => (!ranges.is_empty()).then(|| list::<PortRange>(ranges)),
    }
}

fn ranges(ranges: &Ranges) -> Option<String> {
    match ranges {
        Ranges::All => Some(ANYWHERE.to_owned()),
        Ranges::List(nets) => (!nets.is_empty()).then(|| list(nets)),
    }
}

fn draw_card(drawing: &mut Drawing, card: &Card, y: i32) -> Area {
    let area = Area { x: CARDS, y, width: CARD.0, height: CARD.1 };
    drawing.area(if card.ends_before { "card ends" } else { "card" }, area, 9);
    drawing.short_text("name", (area.x + 14, y + 23), &card.name, 25);
    drawing.short_text("soft", (area.x + 14, y + 42), &card.detail, 31);
    area
}

/// Draws the upper part: containers on the left, the sidecar, and callers, services and resolvers on the right.
fn draw_sidecar(drawing: &mut Drawing, redirect: &Redirect, cards: &[Card], height: i32) {
    let top = TOP + HEAD;
    let sidecar = Area { x: SIDECAR, y: top, width: SIDECAR_WIDTH, height: height - 28 };
    drawing.area("sidecar", sidecar, 12);
    drawing.text("name mid", SIDECAR + SIDECAR_WIDTH / 2, top + 26, "istio-proxy");
    let id = match (redirect.proxy_uid.is_empty(), list(&redirect.proxy_uid)) {
        (false, uids) => format!("uid {uids}"),
        (true, _) => format!("gid {}", list(&redirect.proxy_gid)),
    };
    drawing.short_text("soft mid", (SIDECAR + SIDECAR_WIDTH / 2, top + 45), &id, 32);
    let room = sidecar.height - 62;
    let row = |third: i32| top + 62 + room * (2 * third + 1) / 6;
    let far = |drawing: &mut Drawing, y: i32, name: &str, detail: &str| {
        let area = Area { x: OUTSIDE + 18, y: y - CARD.1 / 2, width: OUTSIDE_WIDTH - 36, height: CARD.1 };
        drawing.area("card", area, 9);
        drawing.text("name", area.x + 12, area.y + 23, name);
        drawing.text("soft", area.x + 12, area.y + 42, detail);
        area
    };
    let areas: Vec<Area> = (0..).zip(cards).map(|(i, card)| draw_card(drawing, card, top + i * STEP)).collect();
    draw_inbound(drawing, redirect, sidecar, row(0), (&areas, cards), far);
    let (tcp, dns) = (row(1), row(2));
    let services = far(drawing, tcp, "Services", "TCP");
    for area in &areas {
        drawing.arrow("out", (area.right(), area.middle()), (SIDECAR - 29, tcp));
    }
    drawing.arrow("out", (sidecar.right(), tcp), (services.x - 2, tcp));
    drawing.port("out", SIDECAR, tcp, redirect.proxy_port);
    drawing.text("soft mid", SIDECAR + SIDECAR_WIDTH / 2 + 10, tcp + 4, "outbound TCP");
    let captured = match &redirect.dns {
        DnsCapture::Off => {
            drawing.text("soft mid", SIDECAR + SIDECAR_WIDTH / 2 + 10, dns + 4, "DNS is not captured");
            return;
        }
        DnsCapture::All => "DNS".to_owned(),
        DnsCapture::Servers { v4, v6 } => {
            let servers = v4.iter().map(ToString::to_string).chain(v6.iter().map(ToString::to_string));
            format!("DNS to {}", servers.collect::<Vec<_>>().join(", "))
        }
    };
    let resolvers = far(drawing, dns, "Resolvers", "DNS");
    for area in &areas {
        drawing.arrow("dns", (area.right(), area.middle() + 8), (SIDECAR - 29, dns));
    }
    drawing.arrow("dns", (sidecar.right(), dns), (resolvers.x - 2, dns));
    drawing.port("dns", SIDECAR, dns, 15053);
    drawing.short_text("soft mid", (SIDECAR + SIDECAR_WIDTH / 2 + 10, dns + 4), &captured, 26);
}

/// Draws inbound traffic: from callers through the sidecar to the applications.
fn draw_inbound(
    drawing: &mut Drawing,
    redirect: &Redirect,
    sidecar: Area,
    y: i32,
    (areas, cards): (&[Area], &[Card]),
    far: impl Fn(&mut Drawing, i32, &str, &str) -> Area,
) {
    let callers = far(drawing, y, "Callers", "TCP, inbound");
    let middle = SIDECAR + SIDECAR_WIDTH / 2 - 10;
    if redirect.inbound_ports_include == Ports::List(Vec::new()) {
        drawing.text("soft mid", middle, y + 4, "inbound is not captured");
        return;
    }
    drawing.arrow("in", (callers.x, y), (sidecar.right() + 29, y));
    for (area, _) in areas.iter().zip(cards).filter(|(_, card)| !card.ends_before) {
        drawing.arrow("in", (sidecar.x, y), (area.right() + 2, area.middle() - 8));
    }
    drawing.port("in", sidecar.right(), y, redirect.inbound_capture_port);
    let which = match &redirect.inbound_ports_include {
        Ports::All => match ports(&redirect.inbound_ports_exclude) {
            Some(excluded) => format!("inbound, except {excluded}"),
            None => "inbound".to_owned(),
        },
        Ports::List(included) => format!("inbound to {}", list(included)),
    };
    let mut lines = wrapped(&which, 24);
    if lines.len() > MAX_LINES {
        lines.truncate(MAX_LINES);
        lines[MAX_LINES - 1].push_str(" …");
    }
    let first = y + 4 - 8 * i32::try_from(lines.len() - 1).unwrap_or_default();
    for (line, y) in lines.iter().zip((first..).step_by(16)) {
        drawing.text_with_tooltip("soft mid", (middle, y), line, &which);
    }
}

/// Draws the lower part: traffic that bypasses the sidecar.
fn draw_lanes(drawing: &mut Drawing, lanes: &[Lane], top: i32) {
    for (lane, y) in lanes.iter().zip((top..).step_by(usize::try_from(STEP).unwrap_or(1))) {
        let area = draw_card(drawing, &lane.card, y);
        drawing.arrow(lane.color, (area.right(), area.middle()), (OUTSIDE + 16, area.middle()));
        drawing.tag((SIDECAR + SIDECAR_WIDTH / 2, area.middle()), &lane.what, 46);
        drawing.short_text("soft", (OUTSIDE + 24, area.middle() + 4), &lane.to, 26);
    }
}

/// Draws the legend and the warnings, and returns the height of the picture.
fn draw_footer(drawing: &mut Drawing, explained: &Explained, top: i32) -> i32 {
    for (color, meaning, x) in LEGEND {
        drawing.arrow(color, (POD + x, top), (POD + x + 34, top));
        drawing.text("soft", POD + x + 42, top + 4, meaning);
    }
    let mut y = top + 36;
    for warning in &explained.explanation.warnings {
        drawing.text("warn", POD, y, "!");
        for line in wrapped(&warning.what, 150) {
            drawing.text("", POD + 16, y, &line);
            y += 19;
        }
        for line in wrapped(&format!("→ {}", warning.next), 160) {
            drawing.text("soft", POD + 16, y, &line);
            y += 18;
        }
        y += 6;
    }
    y
}

/// An SVG document in progress, in pixels from the upper left corner.
#[derive(Debug, Default)]
struct Drawing {
    body: String,
}

/// The position and size of a rectangle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Area {
    x: i32,
    y: i32,
    width: i32,
    height: i32,
}

impl Area {
    const fn right(self) -> i32 {
        self.x + self.width
    }

    const fn middle(self) -> i32 {
        self.y + self.height / 2
    }
}

impl Drawing {
    /// Adds a box with round corners.
    fn area(&mut self, class: &str, Area { x, y, width, height }: Area, radius: i32) {
        let _ = writeln!(
            self.body,
            r#"<rect class="{class}" x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}"/>"#
        );
    }

    /// Adds a line of text, at the beginning or, with class `mid`, the middle of its baseline.
    fn text(&mut self, class: &str, x: i32, y: i32, text: &str) {
        let _ = writeln!(self.body, r#"<text class="{class}" x="{x}" y="{y}">{}</text>"#, xml(text));
    }

    /// Adds a line of text, shortened to `width` characters; a tooltip shows the whole text.
    fn short_text(&mut self, class: &str, (x, y): (i32, i32), text: &str, width: usize) {
        self.text_with_tooltip(class, (x, y), &shortened(text, width), text);
    }

    /// Adds a line of text with the tooltip `whole`.
    fn text_with_tooltip(&mut self, class: &str, (x, y): (i32, i32), line: &str, whole: &str) {
        if line == whole {
            return self.text(class, x, y, line);
        }
        let (line, whole) = (xml(line), xml(whole));
        let _ = writeln!(self.body, r#"<text class="{class}" x="{x}" y="{y}">{line}<title>{whole}</title></text>"#);
    }

    /// Adds an arrow in one of four colors: `out`, `dns`, `in`, `free`.
    fn arrow(&mut self, color: &str, (x1, y1): (i32, i32), (x2, y2): (i32, i32)) {
        let bend = (x2 - x1) / 2;
        let (c1, c2) = (x1 + bend, x2 - bend);
        let _ = writeln!(
            self.body,
            r#"<path class="way {color}" d="M{x1} {y1}C{c1} {y1} {c2} {y2} {x2} {y2}" marker-end="url(#to-{color})"/>"#
        );
    }

    /// Adds a label on an arrow, centered, with at most `width` characters.
    fn tag(&mut self, (x, y): (i32, i32), text: &str, width: usize) {
        let shown = shortened(text, width);
        // The average width of a character of a proportional font at 12 px.
        let width = 7 * i32::try_from(shown.chars().count()).unwrap_or_default() + 16;
        self.area("tag", Area { x: x - width / 2, y: y - 10, width, height: 20 }, 10);
        self.text_with_tooltip("tagged mid", (x, y + 4), &shown, text);
    }

    /// Adds a port number in a rounded box.
    fn port(&mut self, color: &str, x: i32, y: i32, port: u16) {
        self.area(&format!("f-{color}"), Area { x: x - 27, y: y - 11, width: 54, height: 22 }, 11);
        self.text("port", x, y + 4, &port.to_string());
    }

    /// Returns the document.
    fn finish(self, title: &str, width: i32, height: i32) -> String {
        let mut markers = String::new();
        for color in ["out", "dns", "in", "free"] {
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

/// Breaks text at spaces into lines of at most `width` characters.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
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
    fn text_is_wrapped_and_shortened() {
        assert_eq!(wrapped("one two three", 7), ["one two", "three"]);
        assert_eq!((shortened("abcd", 4).as_str(), shortened("abcde", 4).as_str()), ("abcd", "abc…"));
    }
}
