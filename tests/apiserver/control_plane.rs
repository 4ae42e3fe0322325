//! Processes of etcd and kube-apiserver. The tests share them one after the other: each one finds a new cluster.

use crate::client::Client;
use crate::support::program::built;
use crate::support::wait::until;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Logs only requests of service accounts.
const AUDIT: &str = "\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - level: Metadata
    userGroups: [system:serviceaccounts]
  - level: None
";
/// For the start of the API server, on a busy machine.
const DEADLINE: Duration = Duration::from_secs(240);
/// The Service of the API server.
const KUBERNETES: &str = "/api/v1/namespaces/default/services/kubernetes";

/// The servers that no test uses.
static IDLE: Mutex<Vec<Arc<Servers>>> = Mutex::new(Vec::new());
static STARTED: AtomicU64 = AtomicU64::new(0);

/// An API server and its etcd on loopback, which only this test uses, with the objects of a new cluster.
pub(crate) struct ControlPlane(Arc<Servers>);

impl ControlPlane {
    pub(crate) fn start() -> Self {
        let idle = IDLE.lock().expect("no panic while locked").pop();
        let servers = idle.unwrap_or_else(|| Arc::new(Servers::start()));
        servers.reset();
        Self(servers)
    }
}

impl Deref for ControlPlane {
    type Target = Servers;

    fn deref(&self) -> &Servers {
        &self.0
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        // A failed test leaves its servers as they are.
        if !thread::panicking() {
            IDLE.lock().expect("no panic while locked").push(Arc::clone(&self.0));
        }
    }
}

/// The processes, which end with this one.
pub(crate) struct Servers {
    /// The servers' files.
    files: PathBuf,
    /// The files of this test.
    pub(crate) directory: PathBuf,
    pub(crate) port: u16,
    etcd_port: u16,
    admin: (String, String),
    processes: Mutex<Processes>,
    /// The objects of a new cluster, and the API groups that it serves.
    new: Mutex<(Objects, Value)>,
    /// The length of the audit log when this test began.
    audited: AtomicU64,
}

struct Processes {
    starter: Starter,
    /// etcd's data.
    data: PathBuf,
    etcd: Child,
    api: Option<Child>,
}

impl Servers {
    /// Starts the processes, and waits until the API server is ready.
    fn start() -> Self {
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let files = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("apiserver-{number}"));
        let directory = files.join("test");
        let _ = fs::remove_dir_all(&files);
        fs::create_dir_all(&files).expect("writable");
        fs::write(files.join("audit.yaml"), AUDIT).expect("writable");
        let admin = write_certificates(&files);
        let [port, etcd_port, peer_port] = free_ports();
        let starter = Starter::new();
        let mut etcd = Command::new("etcd");
        let (clients, peers) = (format!("http://127.0.0.1:{etcd_port}"), format!("http://127.0.0.1:{peer_port}"));
        let data = files.join("etcd");
        etcd.arg("--data-dir").arg(&data);
        etcd.args(["--listen-client-urls", &clients, "--advertise-client-urls", &clients]);
        etcd.args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers]);
        etcd.args(["--initial-cluster", &format!("default={peers}"), "--unsafe-no-fsync"]);
        let etcd = starter.start(etcd, log(&files, "etcd.log"));
        let processes = Mutex::new(Processes { starter, data, etcd, api: None });
        let (new, audited) = (Mutex::default(), AtomicU64::new(0));
        let servers = Self { files, directory, port, etcd_port, admin, processes, new, audited };
        servers.start_api();
        let admin = servers.admin();
        // The API server creates them when it is ready.
        let namespaces = ["default", "kube-node-lease", "kube-public", "kube-system"];
        let created = |name: &&str| admin.get_path(&format!("/api/v1/namespaces/{name}")).is_ok();
        servers.until(|| namespaces.iter().all(created) && admin.get_path(KUBERNETES).is_ok());
        *servers.new.lock().expect("no panic while locked") = (objects(etcd_port), servers.groups());
        servers
    }

    /// Restores the objects of a new cluster.
    fn reset(&self) {
        if self.processes.lock().expect("no panic while locked").api.is_none() {
            self.start_api();
        }
        let _ = fs::remove_dir_all(&self.directory);
        fs::create_dir_all(&self.directory).expect("writable");
        let new = self.new.lock().expect("no panic while locked");
        restore(self.etcd_port, &new.0);
        self.until(|| self.groups() == new.1);
        self.audited.store(fs::metadata(self.audit_log()).map_or(0, |file| file.len()), Ordering::Relaxed);
    }

    fn groups(&self) -> Value {
        self.admin().get_path("/apis").expect("allowed")
    }

    fn audit_log(&self) -> PathBuf {
        self.files.join("audit.log")
    }

    /// Starts the API server on what etcd has.
    pub(crate) fn start_api(&self) {
        let file = |name: &str| self.files.join(name).display().to_string();
        let mut api = Command::new(built("kube-apiserver"));
        api.args([
            format!("--etcd-servers=http://127.0.0.1:{}", self.etcd_port),
            format!("--secure-port={}", self.port),
            format!("--tls-cert-file={}", file("server.crt")),
            format!("--tls-private-key-file={}", file("server.key")),
            format!("--client-ca-file={}", file("ca.crt")),
            format!("--service-account-key-file={}", file("tokens.pub")),
            format!("--service-account-signing-key-file={}", file("tokens.key")),
            format!("--audit-policy-file={}", file("audit.yaml")),
            format!("--audit-log-path={}", file("audit.log")),
        ]);
        api.args([
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.96.0.0/24",
            "--authorization-mode=RBAC",
            // On by default from Kubernetes 1.36 on (KEP-3962).
            "--feature-gates=MutatingAdmissionPolicy=true",
            "--runtime-config=admissionregistration.k8s.io/v1beta1=true",
        ]);
        let mut processes = self.processes.lock().expect("no panic while locked");
        let mut api = processes.starter.start(api, log(&self.files, "kube-apiserver.log"));
        let client = self.admin();
        let deadline = Instant::now() + DEADLINE;
        while !client.is_ready() {
            let ended = api.try_wait().expect("a child");
            let logs = self.files.display();
            assert!(ended.is_none() && Instant::now() < deadline, "kube-apiserver: {ended:?}; see the logs in {logs}");
        }
        processes.api = Some(api);
    }

    /// Ends the API server at once; etcd stays.
    pub(crate) fn kill_api(&self) {
        let api = self.processes.lock().expect("no panic while locked").api.take();
        end(&mut api.expect("it was started"));
    }

    pub(crate) fn server(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// Returns its certificate authority as PEM.
    pub(crate) fn authority(&self) -> String {
        fs::read_to_string(self.files.join("ca.crt")).expect("written")
    }

    /// Returns a client with all rights.
    pub(crate) fn admin(&self) -> Client {
        let (certificate, key) = &self.admin;
        Client::with_certificate(&self.server(), &self.authority(), certificate, key)
    }

    /// Returns a kubeconfig with all rights, whose context has the namespace `shop`.
    pub(crate) fn admin_kubeconfig(&self) -> Value {
        let (certificate, key) = &self.admin;
        let user = json!({"client-certificate-data": base64(certificate), "client-key-data": base64(key)});
        self.kubeconfig_of(&user)
    }

    /// Returns the kubeconfig of a user.
    pub(crate) fn kubeconfig_of(&self, user: &Value) -> Value {
        let cluster = json!({"server": self.server(), "certificate-authority-data": base64(&self.authority())});
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "c", "cluster": cluster}], "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u", "namespace": "shop"}}],
        })
    }

    /// Writes a kubeconfig with all rights, whose context has no namespace. Returns its path.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        let mut kubeconfig = self.admin_kubeconfig();
        kubeconfig["contexts"][0]["context"].as_object_mut().expect("an object").remove("namespace");
        let path = self.directory.join("kubeconfig");
        fs::write(&path, kubeconfig.to_string()).expect("writable");
        path
    }

    /// Returns a client with this token.
    pub(crate) fn with_token(&self, token: &str) -> Client {
        Client::with_token(&self.server(), &self.authority(), token)
    }

    /// Waits for a condition.
    #[track_caller]
    pub(crate) fn until(&self, holds: impl Fn() -> bool) {
        until("the condition", holds);
    }

    /// Returns the audit events of service accounts.
    pub(crate) fn audit(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.audit_log()).expect("written");
        let begin = usize::try_from(self.audited.load(Ordering::Relaxed)).expect("a length");
        text[begin..].lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        self.api.iter_mut().for_each(end);
        end(&mut self.etcd);
        // More than 64 MB. The other files help to find out why a test failed.
        let _ = fs::remove_dir_all(&self.data);
    }
}

fn end(process: &mut Child) {
    let _ = process.kill();
    let _ = process.wait();
}

fn base64(text: &str) -> Value {
    serde_json::to_value(k8s_openapi::ByteString(text.as_bytes().to_vec())).expect("base64")
}

fn log(directory: &Path, name: &str) -> File {
    File::options().create(true).append(true).open(directory.join(name)).expect("writable")
}

/// Returns three free ports below those that the kernel gives to connections (`ip_local_port_range`): no connection
/// takes one while its server does not run.
fn free_ports() -> [u16; 3] {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = u16::try_from(std::process::id() % 10_000).expect("small");
    let next = || 20_000 + (first + NEXT.fetch_add(1, Ordering::Relaxed)) % 12_000;
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    [(); 3].map(|()| std::iter::repeat_with(next).find(is_free).expect("a port"))
}

/// A thread that starts processes. They end with it (PR_SET_PDEATHSIG refers to the thread that started a process), and
/// it ends with this value or with the test process.
struct Starter {
    commands: Sender<(Command, File)>,
    started: Receiver<Child>,
}

impl Starter {
    fn new() -> Self {
        let (commands, to_start) = channel::<(Command, File)>();
        let (done, started) = channel();
        thread::spawn(move || {
            for (command, log) in to_start {
                let mut tied = Command::new("setpriv");
                tied.args(["--pdeathsig", "KILL"]).arg(command.get_program()).args(command.get_args());
                let errors = log.try_clone().expect("another descriptor");
                let child = tied.stdin(Stdio::null()).stdout(log).stderr(errors).spawn().expect("setpriv starts");
                if done.send(child).is_err() {
                    break;
                }
            }
        });
        Self { commands, started }
    }

    fn start(&self, command: Command, log: File) -> Child {
        self.commands.send((command, log)).expect("the thread lives");
        self.started.recv().expect("the thread lives")
    }
}

/// The address of the Service `kubernetes`.
const SERVICE: &str = "10.96.0.1";

/// Writes `ca.crt`, `server.crt`, `server.key`, `tokens.key` and `tokens.pub`. Returns certificate and key of an
/// administrator as PEM.
fn write_certificates(directory: &Path) -> (String, String) {
    let mut params = CertificateParams::new(Vec::new()).expect("parameters");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, key()).expect("an authority");
    let signed = |params: CertificateParams| {
        let key = key();
        let certificate = params.signed_by(&key, &authority).expect("a certificate");
        (certificate.pem(), key.serialize_pem())
    };
    let put = |name: &str, text: &str| fs::write(directory.join(name), text).expect("writable");
    put("ca.crt", &authority.pem());
    let addresses = ["127.0.0.1", SERVICE].map(str::to_owned).to_vec();
    let (certificate, server_key) = signed(CertificateParams::new(addresses).expect("addresses"));
    put("server.crt", &certificate);
    put("server.key", &server_key);
    let tokens = key();
    put("tokens.key", &tokens.serialize_pem());
    put("tokens.pub", &tokens.public_key_pem());
    // The group that has all rights without a role (kubernetes.io, "User-facing roles").
    let mut admin = CertificateParams::new(Vec::new()).expect("parameters");
    admin.distinguished_name.push(DnType::OrganizationName, "system:masters");
    admin.distinguished_name.push(DnType::CommonName, "admin");
    signed(admin)
}

fn key() -> KeyPair {
    KeyPair::generate().expect("a key")
}

/// Keys and values in Base64.
type Objects = BTreeMap<String, String>;

/// Returns the objects of the etcd on this port.
fn objects(port: u16) -> Objects {
    let all = json!({"key": BASE64_STANDARD.encode("/registry/"), "range_end": BASE64_STANDARD.encode("/registry0")});
    let answer = post(port, "range", &all);
    let text = |value: &Value| value.as_str().expect("Base64").to_owned();
    let pairs = answer["kvs"].as_array().expect("keys").iter();
    let mut found: Objects = pairs.map(|pair| (text(&pair["key"]), text(&pair["value"]))).collect();
    // The API server renews its lease all the time.
    found.retain(|key, _| {
        !BASE64_STANDARD.decode(key).expect("Base64").starts_with(b"/registry/leases/kube-system/apiserver-")
    });
    found
}

/// Deletes the objects that were created since, and restores those that were changed or deleted.
fn restore(port: u16, before: &Objects) {
    let now = objects(port);
    for key in now.keys().filter(|key| !before.contains_key(*key)) {
        post(port, "deleterange", &json!({"key": key}));
    }
    for (key, value) in before.iter().filter(|(key, value)| now.get(*key) != Some(value)) {
        post(port, "put", &json!({"key": key, "value": value}));
    }
}

/// Sends a request to the JSON gateway of etcd, with HTTP 1.0 so that the answer ends with the connection.
fn post(port: u16, method: &str, body: &Value) -> Value {
    let body = body.to_string();
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("etcd listens");
    write!(stream, "POST /v3/kv/{method} HTTP/1.0\r\nContent-Length: {}\r\n\r\n{body}", body.len()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (_, json) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{method}: {answer:?}"));
    serde_json::from_str(json).unwrap_or_else(|error| panic!("{method}: {error}: {answer:?}"))
}
