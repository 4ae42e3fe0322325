//! The plugin's own token: asked for, renewed in time, and kept while the API is down.

use crate::cluster::{Account, ObjectRef, Token};
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
    account: Account,
    of: ObjectRef,
    held: RefCell<Option<Held>>,
}

#[derive(Debug, Clone)]
struct Held {
    token: Token,
    /// When it is to be replaced.
    renewal: Timestamp,
}

impl PluginToken {
    /// That of the service account `of`, for which `account` asks.
    #[must_use]
    pub fn new(account: Account, of: ObjectRef) -> Self {
        Self { account, of, held: RefCell::new(None) }
    }

    /// The token for now. `present` gives the one on the node, which an agent that has just started
    /// keeps while the API gives it none.
    ///
    /// # Errors
    /// There is none, and the API gives none: in words.
    pub fn current(&self, present: impl FnOnce() -> Option<String>) -> Result<String, String> {
        let now = Timestamp::now();
        let mut held = self.held.borrow_mut();
        if let Some(held) = held.as_ref().filter(|held| now < held.renewal) {
            return Ok(held.token.text.clone());
        }
        let token = match self.account.token(&self.of, LIFETIME) {
            Ok(token) => Held { renewal: renewal(now, token.expires), token },
            Err(why) => {
                let known = held.take().map(|held| held.token);
                let known = known.or_else(|| Token::of_account(&present()?, &self.of.namespace, &self.of.name));
                let token = known.filter(|token| now < token.expires).ok_or_else(|| why.to_string())?;
                tracing::warn!("{why}; the plugin goes on with the token that it has, valid until {}", token.expires);
                Held { renewal: now.saturating_add(AGAIN).unwrap_or(now), token }
            }
        };
        Ok(held.insert(token).token.text.clone())
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

    #[test]
    fn a_token_is_replaced_after_a_third_of_its_life() {
        let at = |second| Timestamp::from_second(second).expect("a time");
        assert_eq!(renewal(at(0), at(86_400)), at(28_800));
        assert_eq!(renewal(at(1000), at(1600)), at(1200));
        assert_eq!(renewal(at(1000), at(1000)), at(1000));
    }
}
