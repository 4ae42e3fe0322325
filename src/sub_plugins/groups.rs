//! Lists of owner groups: GIDs, names of the host's groups, `*`.

use super::ids;
use crate::cni::{Error, ItemList};
use crate::policy::Groups;

const ACCEPTED_GROUPS: &str = "GIDs from 0 to 4294967294, names of groups in the host's /etc/group, or *";

/// The list, in its order, none twice.
pub(super) fn parse_groups(list: &ItemList, group_id: &dyn Fn(&str) -> Option<u32>) -> Result<Groups, Error> {
    if list.items.iter().any(|item| item == "*") {
        return Ok(Groups::All);
    }
    list.distinct(ACCEPTED_GROUPS, |item| ids::number(item).or_else(|| group_id(item))).map(Groups::List)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<Groups, Error> {
        parse_groups(&ItemList::from_text("k", text).expect("a list"), &|name| (name == "javausers").then_some(202))
    }

    #[test]
    fn numbers_and_names_of_the_host() {
        assert_eq!(of("101, javausers,202").expect("groups"), Groups::List(vec![101, 202]));
        assert_eq!(of("").expect("groups"), Groups::List(vec![]));
        assert_eq!(of("1,*").expect("groups"), Groups::All);
    }

    #[test]
    fn an_unknown_name_is_refused_by_place() {
        for text in ["nobody-knows", "4294967295", "-1", "1-2"] {
            let error = of(text).expect_err(text);
            assert_eq!(error.msg, format!("k: {text:?} is not accepted; accepted: {ACCEPTED_GROUPS}"));
        }
    }
}
