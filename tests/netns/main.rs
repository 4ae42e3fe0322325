//! Real packets through real rules: every test makes a world of its own, two network namespaces
//! joined by a veth pair, and asks where what was sent arrived. Needs root, `ip` and `iptables`.

mod expectations;
mod foreign_rules;
mod istio;
mod pod;
mod world;
