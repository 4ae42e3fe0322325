//! Facts from the Kubernetes API.

use super::kubeconfig::Kubeconfig;
use super::query::{Object, Query};
use super::retry::{Failure, retry};
use super::{Cluster, about, another_uid, wire};
use crate::cni::{Code, Error};
use crate::pod::{Facts, Namespace, Pod, PodRef};
use kube::Client;
use kube::api::{GetParams, Request};
use kube::client::Body;
use serde::de::DeserializeOwned;
use std::future::poll_fn;
use std::path::PathBuf;
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

/// The API server that a kubeconfig names.
#[derive(Debug)]
pub(super) struct Api {
    /// The kubeconfig; read anew for each request for facts.
    pub(super) kubeconfig: PathBuf,
    /// How long facts may take, all tries together.
    pub(super) timeout: Duration,
}

impl Cluster for Api {
    fn facts(&self, wanted: &PodRef, with_namespace: bool) -> Result<Facts, Error> {
        let started = Instant::now();
        check_name("K8S_POD_NAMESPACE", &wanted.namespace)?;
        check_name("K8S_POD_NAME", &wanted.name)?;
        let kubeconfig = Kubeconfig::load(&self.kubeconfig).map_err(|error| about(wanted, error))?;
        run(self.fetch(started, kubeconfig, wanted, with_namespace))
    }

    fn probe(&self) -> Result<(), Error> {
        let nobody = PodRef { namespace: "default".to_owned(), name: "detour-status-probe".to_owned(), uid: None };
        let kubeconfig = Kubeconfig::load(&self.kubeconfig)?;
        run(async {
            let (server, client) = (&kubeconfig.server(), kubeconfig.client()?);
            let query = Query { object: Object::Pod, wanted: &nobody, server, kubeconfig: &self.kubeconfig };
            let attempt = async || match get::<wire::Pod>(&client, &query).await {
                // That there is no such pod is an answer, and shows the right to ask.
                Ok(_) | Err(Failure::Missing(_)) => Ok(()),
                Err(failure) => Err(failure),
            };
            retry(Instant::now(), PROBE, attempt).await.map_err(|end| query.gave_up(end))
        })
    }
}

/// How long a probe may take; short enough for a runtime that asks every few seconds.
const PROBE: Duration = Duration::from_secs(1);

fn run<T>(work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
    let runtime = runtime.map_err(|e| Error::new(Code::Internal, "no event loop").with_details(e.to_string()))?;
    let done = runtime.block_on(work);
    // Dropping it would wait for a name that is still being resolved.
    runtime.shutdown_background();
    done
}

impl Api {
    async fn fetch(
        &self,
        started: Instant,
        kubeconfig: Kubeconfig<'_>,
        wanted: &PodRef,
        with_namespace: bool,
    ) -> Result<Facts, Error> {
        let server = &kubeconfig.server();
        let client = kubeconfig.client().map_err(|error| about(wanted, error))?;
        let query = |object| Query { object, wanted, server, kubeconfig: &self.kubeconfig };
        let pod = self.pod(started, &client, query(Object::Pod));
        if !with_namespace {
            return Ok(Facts { pod: pod.await?, namespace: None });
        }
        let namespace = self.namespace(started, &client, query(Object::Namespace));
        let (pod, namespace) = both(pod, namespace).await?;
        Ok(Facts { pod, namespace: Some(namespace) })
    }

    async fn pod(&self, started: Instant, client: &Client, query: Query<'_>) -> Result<Pod, Error> {
        let attempt = async || {
            let pod = Pod::from(get::<wire::Pod>(client, &query).await?);
            if pod.is(query.wanted) { Ok(pod) } else { Err(Failure::Missing(another_uid(&pod, query.wanted))) }
        };
        retry(started, self.timeout, attempt).await.map_err(|end| query.gave_up(end))
    }

    async fn namespace(&self, started: Instant, client: &Client, query: Query<'_>) -> Result<Namespace, Error> {
        let attempt = async || Ok(get::<wire::Namespace>(client, &query).await?.into());
        retry(started, self.timeout, attempt).await.map_err(|end| query.gave_up(end))
    }
}

/// One try.
async fn get<T: DeserializeOwned>(client: &Client, query: &Query<'_>) -> Result<T, Failure> {
    let (collection, name) = query.path();
    let request = Request::new(collection).get(name, &GetParams::default());
    let request = request.map_err(|e| Failure::Hopeless(Error::new(Code::Internal, e.to_string())))?;
    let response = client.send(request.map(Body::from)).await.map_err(|e| query.failed(&e))?;
    let status = response.status().as_u16();
    let after = response.headers().get("retry-after").and_then(|value| value.to_str().ok()).map(str::to_owned);
    let body = response.into_body().collect_bytes().await.map_err(|e| query.failed(&e))?;
    if status != 200 {
        return Err(query.refused(status, after.as_deref(), &body));
    }
    serde_json::from_slice(&body).map_err(|e| query.garbled(&e))
}

/// Names become part of a URL, so they must be what an object's name can be (RFC 1123 subdomain).
fn check_name(key: &str, name: &str) -> Result<(), Error> {
    let alphanumeric = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let fine = name.starts_with(alphanumeric)
        && name.ends_with(alphanumeric)
        && name.chars().all(|c| alphanumeric(c) || c == '-' || c == '.');
    let accepted = "accepted: lower-case letters, digits, '-' and '.', a letter or digit at both ends";
    if fine { Ok(()) } else { Err(Error::new(Code::Environment, format!("CNI_ARGS: {key}={name:?}; {accepted}"))) }
}

/// Both values, or the first failure, which does not wait for the other.
async fn both<A, B, E>(
    a: impl Future<Output = Result<A, E>>,
    b: impl Future<Output = Result<B, E>>,
) -> Result<(A, B), E> {
    let (mut a, mut b) = (pin!(a), pin!(b));
    let (mut first, mut second) = (None, None);
    poll_fn(|context| {
        if first.is_none()
            && let Poll::Ready(result) = a.as_mut().poll(context)
        {
            first = Some(result?);
        }
        if second.is_none()
            && let Poll::Ready(result) = b.as_mut().poll(context)
        {
            second = Some(result?);
        }
        match (first.take(), second.take()) {
            (Some(a), Some(b)) => Poll::Ready(Ok((a, b))),
            unfinished => {
                (first, second) = unfinished;
                Poll::Pending
            }
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_an_object_can_have_become_part_of_a_url() {
        for name in ["a", "web-0", "coredns-5d78c9869d-x2x7p", "static.node1.example.com"] {
            check_name("K8S_POD_NAME", name).expect("a name");
        }
        for name in ["", ".", "..", "a/b", "a?watch=1", "a%2f", "A", "a b", "-a", "a.", "ä"] {
            let error = check_name("K8S_POD_NAME", name).expect_err("no name");
            assert_eq!(error.code, Code::Environment);
            assert!(error.msg.contains("K8S_POD_NAME"), "{error}");
        }
    }
}
