//! The picture of `explain --format svg`.

use crate::explain::{Case, annotate};
use serde_json::json;

#[test]
fn the_picture_is_self_contained() {
    let svg = Case::named("redirected").picture();
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"), "{svg}");
    for part in ["web", "vault-agent-init", "15001", "15006", "15053", "UID 1337", "prefers-color-scheme"] {
        assert!(svg.contains(part), "{part}: {svg}");
    }
    for outside in ["href", "url(http", "@import", "<image", "<script", "var("] {
        assert!(!svg.contains(outside), "{outside}");
    }
    assert!(svg.contains(">not a native sidecar<"), "{svg}");
    let native = Case::new(|pod, _| {
        annotate(pod, "detour.io/exclude-outbound-ports-for-uids", "tcp:443:1001");
        annotate(pod, "detour.io/exclude-uids", "1337");
        let proxy = pod["spec"]["containers"].as_array_mut().expect("a list").pop().expect("a sidecar");
        pod["spec"]["initContainers"].as_array_mut().expect("a list").insert(0, proxy);
    });
    let native = native.picture();
    for text in [
        "native sidecar",
        "tcp port 443",
        "pod, detour.io/exclude-outbound-ports-for-uids",
        "configuration, chain[1]",
        "pod, detour.io/exclude-uids",
    ] {
        assert!(native.contains(&format!(">{text}<")), "{text}, whole: {native}");
    }
}

#[test]
fn long_texts_of_a_picture_have_a_tooltip() {
    let ports = (8000..8040).map(|port| port.to_string()).collect::<Vec<_>>();
    let long = Case::new(|pod, conf| {
        annotate(pod, "traffic.sidecar.istio.io/excludeInboundPorts", &ports.join(","));
        annotate(pod, "traffic.sidecar.istio.io/excludeOutboundPorts", &ports.join(","));
        pod["metadata"]["name"] = "n".repeat(200).into();
        conf["chain"][0]["redirect_dns"] = false.into();
        pod["spec"]["containers"][1]["env"] = json!([]);
    });
    let svg = long.picture();
    let ports = ports.join(", ");
    for (line, whole) in [
        ("Pod shop/nnn", format!("Pod shop/{}", "n".repeat(200))),
        ("inbound, except 8000", format!("inbound, except {ports}")),
        ("tcp and udp ports 8000", format!("tcp and udp ports {ports}")),
    ] {
        let is_it = |drawn: &&str| drawn.starts_with("<text ") && drawn.contains(&format!(">{line}"));
        let drawn = svg.lines().find(is_it).expect(line);
        let (shown, rest) = drawn.split_once('>').and_then(|(_, text)| text.split_once("<title>")).expect(drawn);
        assert!(shown.chars().count() < 80 && rest.contains(&whole), "{drawn}");
    }
    assert!(
        svg.contains(">resolvers<") && !svg.contains("15053"),
        "DNS that is not captured bypasses the sidecar: {svg}"
    );
}

#[test]
fn the_picture_shows_who_captures_traffic_and_which_traffic_is_lost() {
    let mut by_istio_init = Case::named("istio-init");
    by_istio_init.conf["chain"] = json!([{"type": "istio-redirect"}]);
    let svg = by_istio_init.picture();
    assert!(svg.contains("captured by istio-init") && !svg.contains(">everything<"), "{svg}");
    // An init container starts before the sidecar, without an exclusion.
    let svg = Case::new(|pod, conf| {
        pod["spec"]["initContainers"][0]["securityContext"]["runAsUser"] = 7.into();
        conf["chain"] = json!([{"type": "istio-redirect"}]);
    })
    .picture();
    for part in [">lost: no sidecar yet<", ">captured and lost<", "way lost"] {
        assert!(svg.contains(part), "{part}: {svg}");
    }
    assert!(!svg.contains(">bypass<"), "nothing bypasses the sidecar: {svg}");
}

/// The size of the font, and the width of a character in it, both in tenths of a pixel, of the classes in `picture.svg`.
const FONTS: [(&str, i32, i32); 7] = [
    ("title", 220, 125),
    ("head", 110, 80),
    ("name", 130, 74),
    ("soft", 120, 64),
    ("tagged", 120, 64),
    ("port", 120, 73),
    ("bad", 130, 71),
];

/// A line of text, and the rectangle that it covers, in tenths of a pixel.
struct Label {
    text: String,
    left: i32,
    right: i32,
    top: i32,
    bottom: i32,
}

fn labels(svg: &str) -> Vec<Label> {
    let label = |line: &str| {
        let (tag, rest) = line.strip_prefix("<text ")?.split_once('>')?;
        let attribute = |name: &str| Some(tag.split_once(&format!("{name}=\""))?.1.split_once('"')?.0);
        let text = rest.split_once('<')?.0.replace("&quot;", "\"");
        let class = attribute("class")?;
        let (_, size, width) = FONTS.into_iter().find(|(name, ..)| class.split(' ').next() == Some(name)).expect(class);
        let number = |name| Some(10 * attribute(name)?.parse::<i32>().ok()?);
        let (x, y) = (number("x")?, number("y")?);
        let width = width * i32::try_from(text.chars().count()).expect("short");
        let left = if class.contains("mid") || class == "port" { x - width / 2 } else { x };
        Some(Label { text, left, right: left + width, top: y - 8 * size / 10, bottom: y + size / 4 })
    };
    svg.lines().filter_map(label).collect()
}

/// Also where texts are as long as they can be.
#[test]
fn labels_do_not_touch_each_other_or_the_edge() {
    let long = Case::new(|pod, conf| {
        let ports = (8000..8040).map(|port| port.to_string()).collect::<Vec<_>>().join(",");
        annotate(pod, "traffic.sidecar.istio.io/excludeInboundPorts", &ports);
        annotate(pod, "detour.io/exclude-outbound-ports-for-uids", &format!("tcp:{ports}:1001"));
        annotate(pod, "detour.io/exclude-uids", "1001,1337");
        annotate(pod, "detour.io/exclude-containers", &"c".repeat(63));
        pod["metadata"]["name"] = "n".repeat(200).into();
        pod["spec"]["initContainers"][0]["name"] = "c".repeat(63).into();
        let init = json!({"name": "i".repeat(63), "securityContext": {"runAsUser": 7}});
        pod["spec"]["initContainers"].as_array_mut().expect("a list").push(init);
        conf["chain"].as_array_mut().expect("a list").push(json!({"type": "container-exclude"}));
    });
    let fails = Case::new(|pod, _| annotate(pod, "detour.io/exclude-uids", &"x".repeat(300)));
    for case in Case::all().iter().chain([&long, &fails]) {
        let (name, svg) = (&case.name, case.explain(&["--format", "svg"]).stdout);
        let width = svg.split_once("width=\"").and_then(|(_, rest)| rest.split_once('"')).expect("a width").0;
        let (labels, width) = (labels(&svg), 10 * width.parse::<i32>().expect("a number"));
        assert!(labels.len() > 4, "{name}: {svg}");
        for (index, one) in labels.iter().enumerate() {
            assert!(0 < one.left && one.right < width, "{name}: {:?}", one.text);
            let touches = |other: &&Label| {
                one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom
            };
            let touched = labels[..index].iter().find(touches).map(|other| &other.text);
            assert_eq!(touched, None, "{name}: {:?}", one.text);
        }
    }
}
