//! Which pod, under which configuration: the arguments by which commands name them.
//!
//! Whose live rules are read: a namespace's, a process's, a container's, or a pod's of this node.

use super::{CommandError, complain};
use clap::Args;
use detour_cni::cni::{CniCommand, Code, Error, NetConf};
use detour_cni::inspect::{Applied, Choice, LiveRules, PodManifest, Subject, Texts, elsewhere};
use detour_cni::netns::find::{FoundNetns, of_container, of_pod};
use detour_cni::state::{ROOT, Store};
use std::fmt::Display;
use std::fs::File;
use std::io::{Read, stdin};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs};

/// The configuration where none is named.
const PLAIN: &str = r#"{"cniVersion": "1.1.0", "name": "istio-cni", "type": "detour"}"#;
/// The same where the pod's attachments are all that asks for something.
const ATTACHMENTS: &str =
    r#"{"cniVersion": "1.1.0", "name": "cluster", "type": "detour", "clusterNetwork": "cluster"}"#;
/// What a file's name ends with when it is read.
const MANIFESTS: [&str; 3] = ["yaml", "yml", "json"];

/// The largest file: kubectl's list of all definitions of a large cluster is smaller.
const LARGEST: u64 = 16 << 20;

/// A pod and a configuration.
#[derive(Debug, Args)]
pub(super) struct SubjectArguments {
    /// Manifests of pods after injection, or of objects with pod templates; - is stdin
    ///
    /// YAML or JSON, of one object, several documents or a list. A Namespace in it is that of its pods.
    #[arg(short = 'f', long = "file", value_name = "FILE", conflicts_with = "kubeconfig")]
    file: Option<PathBuf>,
    /// The manifest of the pod's namespace, if FILE does not hold it
    #[arg(long, value_name = "NS.yaml", requires = "file")]
    namespace_file: Option<PathBuf>,
    /// Manifests of the definitions that the pod's networks refer to; may be repeated
    ///
    /// Without --config, the pod's attachments are all that asks for something, as where Multus runs them.
    #[arg(long, value_name = "FILE|DIR", requires = "file")]
    definitions: Vec<PathBuf>,
    /// The pod that is asked of the cluster; with -f, the one object of FILE: NAME or KIND/NAME
    #[arg(value_name = "POD")]
    pod: Option<String>,
    #[command(flatten)]
    cluster: ClusterArguments,
}

/// A configuration, and the cluster that is asked.
#[derive(Debug, Args)]
pub(super) struct ClusterArguments {
    /// The plugin's configuration, a plugin list that has it, or an ADD's stdin; - is stdin
    ///
    /// A plugin list applies to every pod. The configuration of one plugin applies to pods whose annotation
    /// k8s.v1.cni.cncf.io/networks selects its name, as Multus runs it.
    /// Without --config: type detour with its defaults, for every pod.
    #[arg(long, value_name = "CONF")]
    config: Option<PathBuf>,
    /// The namespace of the pod that is asked of the cluster; with -f, of the objects that are meant
    ///
    /// With -f, it is also the namespace of objects that name none, as for kubectl.
    #[arg(short, long, value_name = "NS")]
    pub(super) namespace: Option<String>,
    /// How to reach the cluster; else KUBECONFIG, ~/.kube/config, what the configuration says
    #[arg(long, value_name = "PATH")]
    kubeconfig: Option<PathBuf>,
}

/// Pods of manifests, or the pod that the cluster knows, and the configuration.
pub(super) enum Subjects {
    /// Those of manifests.
    Given(Box<(PodManifest, Applied)>),
    /// The cluster's.
    Known(Box<Subject>),
}

impl SubjectArguments {
    /// Reads the files, or asks the cluster, for exactly one pod.
    ///
    /// # Errors
    /// A file can't be read or understood, it holds several pods, or the cluster has no answer.
    pub(super) fn read(&self) -> Result<Subject, CommandError> {
        match self.read_all()? {
            Subjects::Known(subject) => Ok(*subject),
            Subjects::Given(given) => {
                let (found, conf) = *given;
                Ok(found.subject(found.one().map_err(CommandError::Input)?, conf)?)
            }
        }
    }

    /// Reads the files, or asks the cluster.
    ///
    /// # Errors
    /// A file can't be read or understood, or the cluster has no answer.
    pub(super) fn read_all(&self) -> Result<Subjects, CommandError> {
        let is_stdin = |path: &&PathBuf| path.as_os_str() == "-";
        if [&self.file, &self.cluster.config, &self.namespace_file].into_iter().flatten().filter(is_stdin).count() > 1 {
            return Err(CommandError::Usage("stdin can be one of the files only".to_owned()));
        }
        match (&self.file, &self.pod) {
            (Some(file), name) => {
                let plain = if self.definitions.is_empty() { PLAIN } else { ATTACHMENTS };
                let conf = self.cluster.conf(plain)?;
                let pods = text(file)?;
                let namespace = self.namespace_file.as_ref().map(|path| Ok::<_, CommandError>((path, text(path)?)));
                let namespace = namespace.transpose()?;
                let mut definitions = Vec::new();
                for place in &self.definitions {
                    for path in manifests(place)? {
                        definitions.push((text(&path)?, path));
                    }
                }
                let texts = Texts {
                    pods: (file, &pods),
                    namespace: namespace.as_ref().map(|(path, text)| (path.as_path(), text.as_str())),
                    definitions: definitions.iter().map(|(text, path)| (path.as_path(), text.as_str())).collect(),
                };
                let choice = Choice { namespace: self.cluster.namespace.as_deref(), name: name.as_deref() };
                let found = PodManifest::read(&texts, &choice).map_err(CommandError::Input)?;
                if let Some(skipped) = found.skipped() {
                    let note = format_args!("{}: skipped, neither pod nor pod template: {skipped}", file.display());
                    complain(note, ExitCode::SUCCESS);
                }
                Ok(Subjects::Given(Box::new((found, conf))))
            }
            (None, Some(pod)) => Ok(Subjects::Known(Box::new(self.cluster.subject(pod)?))),
            _ => Err(CommandError::Usage("name a pod: -f FILE, or -n NS POD".to_owned())),
        }
    }
}

impl ClusterArguments {
    /// The configuration, `plain` where none is named.
    fn conf(&self, plain: &str) -> Result<Applied, CommandError> {
        Ok(match &self.config {
            Some(path) => Applied::read(path, &read(path)?).map_err(CommandError::Input)?,
            None => NetConf::parse(plain.as_bytes(), CniCommand::Add, "detour")?.into(),
        })
    }

    /// Asks the cluster for a pod of `--namespace`.
    ///
    /// # Errors
    /// The namespace isn't said, the configuration can't be understood, or the cluster has no answer.
    pub(super) fn subject(&self, pod: &str) -> Result<Subject, CommandError> {
        let Some(namespace) = &self.namespace else {
            return Err(CommandError::Usage("name the pod's namespace with -n".to_owned()));
        };
        Ok(Subject::of_cluster(self.conf(PLAIN)?, kubeconfig(self.kubeconfig.as_deref())?, (namespace, pod))?)
    }
}

/// The kubeconfig that the flag names, else that of the environment.
///
/// # Errors
/// The flag names a missing file.
fn kubeconfig(flag: Option<&Path>) -> Result<Option<PathBuf>, CommandError> {
    if let Some(path) = flag {
        present("--kubeconfig", path)?;
    }
    let absolute = |path: PathBuf| {
        std::path::absolute(&path).map_err(|error| CommandError::Usage(format!("{}: {error}", path.display())))
    };
    flag.map(Path::to_owned).or_else(kubeconfig_of_environment).map(absolute).transpose()
}

/// The first file that `KUBECONFIG` lists, else `~/.kube/config` if it exists, as for kubectl.
pub(super) fn kubeconfig_of_environment() -> Option<PathBuf> {
    let listed = || env::split_paths(&env::var_os("KUBECONFIG")?).find(|path| !path.as_os_str().is_empty());
    let home = || env::var_os("HOME").filter(|home| !home.is_empty()).map(|home| Path::new(&home).join(".kube/config"));
    listed().or_else(|| home().filter(|path| path.is_file()))
}

/// A file or directory that a flag names must exist.
///
/// # Errors
/// It can't be looked at.
pub(super) fn present(flag: &str, path: &Path) -> Result<(), CommandError> {
    let unread = |why| CommandError::Usage(format!("{flag} {}: {why}", path.display()));
    fs::metadata(path).map(|_| ()).map_err(unread)
}

/// The file itself, or those of a directory in the order of their names.
fn manifests(place: &Path) -> Result<Vec<PathBuf>, CommandError> {
    if !place.is_dir() {
        return Ok(vec![place.to_owned()]);
    }
    let failed = |error| CommandError::Usage(format!("{} can't be read: {error}", place.display()));
    let mut files = Vec::new();
    for entry in fs::read_dir(place).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|extension| MANIFESTS.iter().any(|known| extension == *known)) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn read(path: &Path) -> Result<Vec<u8>, CommandError> {
    let unread = |why: &dyn Display| CommandError::Usage(format!("{} can't be read: {why}", path.display()));
    // The user names it, and waits for it if need be: `<(kubectl get …)` is a pipe.
    #[expect(clippy::disallowed_methods, reason = "a pipe of the user's own is accepted")]
    let source: Box<dyn Read> = match path.as_os_str() == "-" {
        true => Box::new(stdin()),
        false => Box::new(File::open(path).map_err(|error| unread(&error))?),
    };
    let mut bytes = Vec::new();
    source.take(LARGEST + 1).read_to_end(&mut bytes).map_err(|error| unread(&error))?;
    if bytes.len() as u64 > LARGEST { Err(unread(&format!("larger than {LARGEST} bytes"))) } else { Ok(bytes) }
}

pub(super) fn text(path: &Path) -> Result<String, CommandError> {
    String::from_utf8(read(path)?).map_err(|_| CommandError::Usage(format!("{} is not UTF-8", path.display())))
}

/// A namespace, by what is in it.
#[derive(Debug, Args)]
pub(super) struct LiveArguments {
    /// The network namespace of this process
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
    /// The network namespace of this container: its ID, or the beginning of that
    #[arg(long, value_name = "ID")]
    container: Option<String>,
    /// The network namespace of the pod with this UID, without asking the cluster
    #[arg(long, value_name = "UID")]
    pod_uid: Option<String>,
    /// Where the node's file system is mounted: /host in the agent's container
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
}

/// What names a namespace.
pub(super) enum NetnsSelector {
    /// Its path, or its name in /run/netns.
    Netns(PathBuf),
    /// A process in it.
    Process(u32),
    /// A container in it.
    Container(String),
    /// A pod's UID as the node knows it.
    Uid(String),
    /// A pod as the cluster knows it.
    Pod(Box<Subject>),
}

/// Rules, and where they were found.
pub(super) struct NetnsRules {
    pub(super) rules: LiveRules,
    pub(super) netns: PathBuf,
    /// How the namespace is known, where that had to be found out.
    pub(super) evidence: Option<String>,
}

impl LiveArguments {
    /// What the arguments name.
    pub(super) fn named(&self) -> Option<NetnsSelector> {
        let process = self.pid.map(NetnsSelector::Process);
        let container = || self.container.clone().map(NetnsSelector::Container);
        process.or_else(container).or_else(|| self.pod_uid.clone().map(NetnsSelector::Uid))
    }

    /// Reads the rules. `question` is what is asked, as arguments of this program, without whose rules.
    ///
    /// # Errors
    /// There is no such namespace here (where the pod's node is known, with what to run there), or it
    /// can't be read.
    pub(super) fn read(&self, whose: &NetnsSelector, question: &str) -> Result<NetnsRules, CommandError> {
        present("--root", &self.root)?;
        let path = match whose {
            NetnsSelector::Netns(path) => self.netns(path),
            NetnsSelector::Process(pid) => self.root.join(format!("proc/{pid}/ns/net")),
            NetnsSelector::Container(id) => {
                return self.found(of_container(&self.root, id)?.ok_or_else(|| unknown(&format!("container {id}")))?);
            }
            NetnsSelector::Uid(uid) => {
                return self.found(of_pod(&self.root, uid)?.ok_or_else(|| unknown(&format!("pod {uid}")))?);
            }
            NetnsSelector::Pod(subject) => return self.found(self.of_subject(subject, question)?),
        };
        let rules = LiveRules::read(&path, &self.store()).map_err(|error| match whose {
            NetnsSelector::Netns(place) if is_name(place) && !path.exists() => {
                let name = place.display();
                let msg =
                    format!("{}; ip netns lists those that have names, and a pod is named as -n NS {name}", error.msg);
                CommandError::Input(Error { msg, ..error })
            }
            NetnsSelector::Netns(_) if !path.exists() => CommandError::Input(error),
            _ => error.into(),
        })?;
        Ok(NetnsRules { rules, netns: path, evidence: None })
    }

    fn found(&self, found: FoundNetns) -> Result<NetnsRules, CommandError> {
        let rules = LiveRules::of(&found.open()?, &self.store())?;
        Ok(NetnsRules { rules, netns: found.netns, evidence: Some(found.evidence) })
    }

    fn store(&self) -> Store {
        Store::new(self.root.join(ROOT.trim_start_matches('/')))
    }

    fn of_subject(&self, subject: &Subject, question: &str) -> Result<FoundNetns, Error> {
        let (pod, name) = (&subject.facts.pod, subject.name());
        let wrong = |why: &str| Error::new(Code::InvalidNetns, format!("pod {name}: {why}"));
        if pod.host_network {
            return Err(wrong("it is on its node's own network (spec.hostNetwork), where no rules are made for it"));
        }
        let uid =
            pod.uid_on_node().ok_or_else(|| wrong("it has no UID (metadata.uid), by which its node would know it"))?;
        let there = || {
            let agents = subject.conf.kubernetes.agent_namespace.as_deref();
            elsewhere(pod, agents, None, &format!("{question} --pod-uid {uid}"))
        };
        let error = match of_pod(&self.root, uid) {
            Ok(Some(found)) => return Ok(found),
            Ok(None) => unknown(&format!("pod {name} ({uid})")),
            Err(error) => error,
        };
        Err(Error { msg: format!("{}; {}", error.msg, there()), ..error })
    }

    /// A bare name is one that `ip netns` knows.
    fn netns(&self, path: &Path) -> PathBuf {
        if is_name(path) { self.root.join("run/netns").join(path) } else { path.to_owned() }
    }
}

fn is_name(path: &Path) -> bool {
    path.components().count() == 1 && path.is_relative()
}

fn unknown(what: &str) -> Error {
    let msg = format!("{what}: neither a result that its runtime kept nor a process of it is on this node");
    Error::new(Code::InvalidNetns, msg)
}
