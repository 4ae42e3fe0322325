//! The kubeconfig that the configuration names.

use super::target::CheckTarget;
use super::check::{Check, Results, CheckVerdict};
use super::configuration;
use super::report::CheckGroup;
use crate::cluster::{Authority, CredentialsSummary, KubeconfigSummary};
use crate::cni::NetConf;
use k8s_openapi::jiff::Timestamp;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

pub(super) const PRESENT: Check = Check::of(CheckGroup::Node, "kubeconfig-present", "the plugin's kubeconfig is there");
pub(super) const PRIVATE: Check = Check::of(CheckGroup::Node, "kubeconfig-private", "only root may read it");
pub(super) const VALID: Check = Check::of(CheckGroup::Node, "kubeconfig-valid", "it can be used");
pub(super) const TOKEN: Check = Check::of(CheckGroup::Node, "token-valid", "its token has not expired");
/// All of them.
pub(super) const ALL: [&Check; 4] = [&PRESENT, &PRIVATE, &VALID, &TOKEN];
/// Those that must hold before the API can be asked with it.
pub(super) const USABLE: [&Check; 3] = [&PRESENT, &VALID, &TOKEN];

const REWRITE: &str = "have it written again: detour install, or see why the agent on this node does not write it";

/// Looks at it. Where it is, as this process sees it, and what it says.
pub(super) fn examine_kubeconfig(case: &CheckTarget, conf: Option<&NetConf>, checkup: &mut Results) -> Option<(PathBuf, KubeconfigSummary)> {
    let Some(conf) = conf else {
        checkup.after(&[&configuration::PRESENT, &configuration::VALID], &PRESENT, || {
            CheckVerdict::not_checked("nothing names it")
        });
        return none(checkup);
    };
    let Some(path) = conf.kubernetes.kubeconfig.as_deref().filter(|path| !path.as_os_str().is_empty()) else {
        let why = match &conf.kubernetes.manifests_dir {
            Some(dir) => format!("facts come from the files in {}, not from an API", dir.display()),
            None => "the configuration names no kubeconfig: it goes by itself alone".to_owned(),
        };
        checkup.add(&PRESENT, CheckVerdict::not_checked(why));
        return None;
    };
    let shown = path.display();
    let reached = case.reach_named(path).and_then(|reached| Ok((fs::metadata(&reached)?, reached)));
    let (metadata, reached) = match reached {
        Ok((metadata, reached)) if metadata.is_file() => (metadata, reached),
        Ok(_) => {
            checkup.add(&PRESENT, CheckVerdict::fail(format!("{shown} is no regular file"), REWRITE));
            return none(checkup);
        }
        Err(why) => {
            checkup.add(&PRESENT, CheckVerdict::fail(format!("{shown}: {why}"), REWRITE));
            return none(checkup);
        }
    };
    checkup.add(&PRESENT, CheckVerdict::pass(shown.to_string()));
    let mode = metadata.permissions().mode() & 0o7777;
    checkup.add(
        &PRIVATE,
        match mode & 0o077 {
            0 => CheckVerdict::pass(format!("mode {mode:04o}")),
            _ => CheckVerdict::fail(
                format!("{shown} has mode {mode:04o}: others can take its token"),
                format!("chmod 0600 {shown}"),
            ),
        },
    );
    // On the node itself, who owns the links in the path counts as well.
    let named = if case.mount == Path::new("/") { path } else { &reached };
    match KubeconfigSummary::read(&case.mount, named) {
        Ok(summary) => {
            checkup.add(&VALID, valid(&summary));
            checkup.add(&TOKEN, token(&summary, Timestamp::now().as_second()));
            Some((reached, summary))
        }
        Err(error) => {
            checkup.add(&VALID, CheckVerdict::fail(error.to_string(), REWRITE));
            checkup.after(&[&VALID], &TOKEN, || CheckVerdict::pass(""));
            None
        }
    }
}

fn none<T>(checkup: &mut Results) -> Option<T> {
    for check in [&PRIVATE, &VALID, &TOKEN] {
        checkup.after(&[&PRESENT], check, || CheckVerdict::pass(""));
    }
    None
}

fn valid(summary: &KubeconfigSummary) -> CheckVerdict {
    let server = &summary.server;
    let by = match &summary.authority {
        Authority::Embedded => "its authority is in it".to_owned(),
        Authority::File(file) => format!("its authority is in {}", file.display()),
        Authority::System => "the node's own authorities are asked, for it names none".to_owned(),
        Authority::Nobody => {
            return CheckVerdict::fail(
                format!("{server}: insecure-skip-tls-verify is true, so that anybody can answer for it"),
                "write certificate-authority-data instead; detour install does",
            );
        }
    };
    let who = match &summary.credentials {
        CredentialsSummary::Token => "a token".to_owned(),
        CredentialsSummary::TokenFile(file) => format!("the token in {}", file.display()),
        CredentialsSummary::Certificate => "a client certificate".to_owned(),
        CredentialsSummary::Nothing => {
            return CheckVerdict::fail(format!("{server}: it has no credentials"), REWRITE);
        }
    };
    CheckVerdict::pass(format!("{server} with {who}; {by}"))
}

fn token(summary: &KubeconfigSummary, now: i64) -> CheckVerdict {
    let shown =
        |seconds: i64| Timestamp::from_second(seconds).map_or_else(|_| "for ever".to_owned(), |t| t.to_string());
    match (&summary.token, summary.expires) {
        (None, _) => CheckVerdict::not_checked("it has no token"),
        (Some(_), None) => CheckVerdict::pass("it says nothing of an end"),
        (Some(_), Some(end)) if end > now => CheckVerdict::pass(format!("valid until {}", shown(end))),
        (Some(_), Some(end)) => CheckVerdict::fail(
            format!("it expired at {}", shown(end)),
            "see whether the agent runs on this node, which renews it: kubectl get pods -A -o wide -l \
             app.kubernetes.io/component=agent; or install again with a new token",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(expires: Option<i64>) -> KubeconfigSummary {
        let (authority, credentials) = (Authority::Embedded, CredentialsSummary::Token);
        KubeconfigSummary { server: "https://a".into(), authority, credentials, token: Some("t".into()), expires }
    }

    #[test]
    fn a_token_counts_until_its_end() {
        let outcome = |expires| token(&summary(expires), 1000);
        assert_eq!(outcome(Some(4_102_444_800)), CheckVerdict::pass("valid until 2100-01-01T00:00:00Z"));
        assert!(matches!(outcome(Some(1000)), CheckVerdict::Fail(found, _) if found.contains("1970-01-01T00:16:40Z")));
        assert_eq!(outcome(None), CheckVerdict::pass("it says nothing of an end"));
        assert!(matches!(token(&KubeconfigSummary { token: None, ..summary(None) }, 0), CheckVerdict::NotChecked(..)));
    }

    #[test]
    fn a_server_that_nobody_vouches_for_and_nobody_who_asks_are_failures() {
        assert!(matches!(valid(&summary(None)), CheckVerdict::Pass(_)));
        assert!(matches!(valid(&KubeconfigSummary { authority: Authority::Nobody, ..summary(None) }), CheckVerdict::Fail(..)));
        assert!(matches!(valid(&KubeconfigSummary { credentials: CredentialsSummary::Nothing, ..summary(None) }), CheckVerdict::Fail(..)));
    }
}
