//! The plugin's own token: asked for, renewed in time, and kept while the API is down.

use crate::cluster::{ObjectRef, ServiceAccount, Token};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use std::cell::RefCell;
use std::time::Duration;

/// What is asked for. It isn't bound to the agent's pod, so that the plugin works while an agent is
/// replaced; a day, for one that is renewed after a third of it lasts through a night without agent or
/// API, and one that was stolen is worth nothing the day after.
const LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);
/// After a failure.
const AGAIN: SignedDuration = SignedDuration::from_secs(60);

/// The token of the service account that the plugin is on a node.
#[derive(Debug)]
pub struct PluginToken {
    account: ServiceAccount,
    of: ObjectRef,
    held: RefCell<GrantedToken>,
}

/// What was given last.
#[derive(Debug, Default)]
struct GrantedToken {
    token: Option<Token>,
    /// When it is to be replaced.
    renewal: Timestamp,
    /// Why it was not, the last time.
    trouble: Option<String>,
}

impl PluginToken {
    /// That of the service account `of`, for which `account` asks.
    #[must_use]
    pub fn new(account: ServiceAccount, of: ObjectRef) -> Self {
        Self { account, of, held: RefCell::default() }
    }

    /// The token for now. `present` gives the one on the node, which an agent that has just started
    /// keeps while the API gives it none.
    ///
    /// # Errors
    /// There is none, and the API gives none: in words.
    pub fn current(&self, present: impl FnOnce() -> Option<String>) -> Result<String, String> {
        let mut held = self.held.borrow_mut();
        let told = held.trouble.is_some();
        let ask = || self.account.token(&self.of, LIFETIME).map_err(|why| why.to_string());
        let known = || Token::of_account(&present()?, &self.of.namespace, &self.of.name);
        let token = held.at(Timestamp::now(), ask, known)?;
        if let Some(why) = held.trouble.as_ref().filter(|_| !told) {
            tracing::warn!("{why}; the plugin goes on with the token that it has, valid until {}", token.expires);
        }
        Ok(token.text)
    }
}

impl GrantedToken {
    /// The token for `now`: the one that is held until it is due, then what `ask` gives; where that fails,
    /// the held one or else the `known` one, as long as it is valid.
    fn at(
        &mut self,
        now: Timestamp,
        ask: impl FnOnce() -> Result<Token, String>,
        known: impl FnOnce() -> Option<Token>,
    ) -> Result<Token, String> {
        if let Some(token) = self.token.as_ref().filter(|_| now < self.renewal) {
            return Ok(token.clone());
        }
        let (token, renewal, trouble) = match ask() {
            Ok(token) => (token.clone(), renewal(now, token.expires), None),
            Err(why) => match self.token.take().or_else(known).filter(|token| now < token.expires) {
                Some(token) => (token, now.saturating_add(AGAIN).unwrap_or(now), Some(why)),
                None => return Err(why),
            },
        };
        *self = Self { token: Some(token.clone()), renewal, trouble };
        Ok(token)
    }
}

/// When a token that is given `now` is to be replaced: after a third of its life, however short the
/// API server has made that.
fn renewal(now: Timestamp, expires: Timestamp) -> Timestamp {
    let third = now.duration_until(expires) / 3;
    now.saturating_add(third).unwrap_or(expires)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    fn token(text: &str, expires: i64) -> Token {
        Token { text: text.into(), expires: at(expires) }
    }

    fn never() -> Result<Token, String> {
        panic!("not asked")
    }

    fn down() -> Result<Token, String> {
        Err("down".into())
    }

    #[test]
    fn it_is_replaced_after_a_third_of_its_life_however_short_that_is() {
        let mut held = GrantedToken::default();
        let first = token("first", 1000 + 600);
        assert_eq!(held.at(at(1000), || Ok(first.clone()), || None), Ok(first.clone()));
        assert_eq!(held.at(at(1199), never, || None), Ok(first));
        let second = token("second", 1200 + 86_400);
        assert_eq!(held.at(at(1200), || Ok(second.clone()), || None), Ok(second.clone()));
        assert_eq!(held.at(at(1200 + 28_799), never, || None), Ok(second));
    }

    #[test]
    fn while_nobody_gives_another_it_is_kept_to_its_end_and_asked_for_once_a_minute() {
        let mut held = GrantedToken::default();
        let first = token("first", 3000);
        held.at(at(0), || Ok(first.clone()), || None).expect("given");
        assert_eq!(held.at(at(1000), down, || None), Ok(first.clone()));
        assert_eq!(held.trouble.as_deref(), Some("down"));
        assert_eq!(held.at(at(1059), never, || None), Ok(first.clone()));
        assert_eq!(held.at(at(2999), down, || None), Ok(first));
        assert_eq!(held.at(at(3059), down, || None), Err("down".into()));
        let second = token("second", 6000);
        assert_eq!(held.at(at(3060), || Ok(second.clone()), || None), Ok(second));
        assert_eq!(held.trouble, None);
    }

    #[test]
    fn one_that_starts_keeps_what_is_on_the_node_while_it_is_valid() {
        let known = token("known", 100);
        assert_eq!(GrantedToken::default().at(at(99), down, || Some(known.clone())), Ok(known.clone()));
        assert_eq!(GrantedToken::default().at(at(100), down, || Some(known.clone())), Err("down".into()));
        let fresh = token("fresh", 200);
        assert_eq!(GrantedToken::default().at(at(0), || Ok(fresh.clone()), || panic!("not looked for")), Ok(fresh));
    }
}
