//! The example pod on OpenShift after Istio's injection: the namespace's UID range is 1000650000/10000, the proxy has
//! its last UID, and a Vault init container is fixed at 1337.

use crate::world::Process;

/// `metadata.uid`.
pub(crate) const UID: &str = "8e5bd6a4-9a35-4f0e-9d2b-1c33a5b0a001";

pub(crate) const APP_PROCESS: Process = Process { uid: 1_000_650_000, gid: 1_000_650_000 };
pub(crate) const PROXY: Process = Process { uid: 1_000_659_999, gid: 1_000_659_999 };
pub(crate) const VAULT_INIT: Process = Process { uid: 1337, gid: 1_000_650_000 };

pub(crate) const NAMESPACE: &str = r"
apiVersion: v1
kind: Namespace
metadata:
  name: shop
  annotations:
    openshift.io/sa.scc.uid-range: 1000650000/10000
    openshift.io/sa.scc.supplemental-groups: 1000650000/10000
";

/// Returns the pod, with annotations (`key: value`) in addition to the injector's.
pub(crate) fn manifest(dns_capture: bool, proxy: Process, annotations: &[(&str, &str)]) -> String {
    let annotations: String = annotations.iter().map(|(key, value)| format!("    {key}: \"{value}\"\n")).collect();
    format!(
        r#"
apiVersion: v1
kind: Pod
metadata:
  name: web-0
  namespace: shop
  uid: {UID}
  annotations:
    k8s.v1.cni.cncf.io/networks: default/istio-cni
    sidecar.istio.io/status: '{{"revision":"default"}}'
{annotations}spec:
  nodeName: node-1
  initContainers:
  - name: vault-agent-init
    image: vault
    securityContext: {{ runAsUser: {init_uid} }}
  containers:
  - name: web
    image: web
    securityContext: {{ runAsUser: {app_uid} }}
  - name: istio-proxy
    image: proxyv2
    args: [proxy, sidecar]
    env:
    - {{ name: ISTIO_META_DNS_CAPTURE, value: "{dns_capture}" }}
    securityContext: {{ runAsUser: {uid}, runAsGroup: {gid} }}
"#,
        init_uid = VAULT_INIT.uid,
        app_uid = APP_PROCESS.uid,
        uid = proxy.uid,
        gid = proxy.gid,
    )
}
