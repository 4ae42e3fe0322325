//! One result for the runtime out of those of all attachments.

use super::{AddResult, InterfaceAddress};

impl AddResult {
    /// The default network's result (`self`) with the interfaces of the other attachments after
    /// its own, and with `addresses` their addresses, too. Routes and DNS are the default network's.
    #[must_use]
    pub fn merged<'a>(mut self, others: impl IntoIterator<Item = &'a Self>, addresses: bool) -> Self {
        for other in others {
            let first = self.interfaces.len();
            self.interfaces.extend(other.interfaces.iter().cloned());
            if addresses {
                let moved = |ip: &InterfaceAddress| InterfaceAddress { interface: other.moved(ip.interface, first), ..ip.clone() };
                self.ips.extend(other.ips.iter().map(moved));
            }
        }
        self
    }

    /// Where the interface at `index` stands once this result's first one stands at `first`. An
    /// index of none of its interfaces must not become one of another attachment's.
    fn moved(&self, index: Option<i64>, first: usize) -> Option<i64> {
        let index = usize::try_from(index?).ok().filter(|index| *index < self.interfaces.len())?;
        i64::try_from(first + index).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn result(value: &Value) -> AddResult {
        AddResult::read(value, "1.0.0").expect("a result")
    }

    fn merged(addresses: bool) -> Value {
        let default = result(&json!({
            "interfaces": [{"name": "vethA"}, {"name": "eth0", "sandbox": "/n"}],
            "ips": [{"interface": 1, "address": "10.0.0.2/24", "gateway": "10.0.0.1"}],
            "routes": [{"dst": "0.0.0.0/0"}], "dns": {"domain": "d"}, "own": 1,
        }));
        let macvlan = result(&json!({
            "interfaces": [{"name": "net1", "sandbox": "/n"}],
            "ips": [{"interface": 0, "address": "10.1.0.2/24"}, {"interface": 1, "address": "fd::1/64"}],
            "routes": [{"dst": "10.9.0.0/16"}], "dns": {"domain": "e"}, "other": 1,
        }));
        let bridge = result(&json!({
            "interfaces": [{"name": "br0"}, {"name": "net2", "sandbox": "/n"}],
            "ips": [{"interface": 1, "address": "10.2.0.2/24"}, {"address": "10.2.0.3/24"}],
        }));
        default.merged([&macvlan, &AddResult::default(), &bridge], addresses).to_json("1.0.0").expect("JSON")
    }

    #[test]
    fn interfaces_are_all_attachments_and_the_rest_the_default_networks() {
        let merged = merged(false);
        let names: Vec<_> = merged["interfaces"].as_array().expect("an array").iter().map(|i| &i["name"]).collect();
        assert_eq!(names, ["vethA", "eth0", "net1", "br0", "net2"]);
        assert_eq!(merged["ips"], json!([{"interface": 1, "address": "10.0.0.2/24", "gateway": "10.0.0.1"}]));
        assert_eq!((&merged["routes"], &merged["dns"]), (&json!([{"dst": "0.0.0.0/0"}]), &json!({"domain": "d"})));
        assert_eq!((&merged["own"], &merged["other"]), (&json!(1), &Value::Null));
    }

    #[test]
    fn addresses_of_all_point_to_their_interfaces() {
        let wanted = json!([
            {"interface": 1, "address": "10.0.0.2/24", "gateway": "10.0.0.1"},
            {"interface": 2, "address": "10.1.0.2/24"}, {"address": "fd::1/64"},
            {"interface": 4, "address": "10.2.0.2/24"}, {"address": "10.2.0.3/24"},
        ]);
        assert_eq!(merged(true)["ips"], wanted);
    }
}
