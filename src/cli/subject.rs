//! Which pod, under which configuration: the arguments by which commands name them.

use super::{Failure, complain};
use clap::Args;
use detour_cni::cni::{Command, NetConf};
use detour_cni::inspect::{Applied, Choice, Manifest, Subject, Texts};
use std::env;
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{Read, stdin};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

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
    Given(Box<(Manifest, Applied)>),
    /// The cluster's.
    Known(Box<Subject>),
}

impl SubjectArguments {
    /// Reads the files, or asks the cluster, for exactly one pod.
    ///
    /// # Errors
    /// A file can't be read or understood, it holds several pods, or the cluster has no answer.
    pub(super) fn read(&self) -> Result<Subject, Failure> {
        match self.read_all()? {
            Subjects::Known(subject) => Ok(*subject),
            Subjects::Given(given) => {
                let (found, conf) = *given;
                Ok(found.subject(found.one().map_err(Failure::Input)?, conf)?)
            }
        }
    }

    /// Reads the files, or asks the cluster.
    ///
    /// # Errors
    /// A file can't be read or understood, or the cluster has no answer.
    pub(super) fn read_all(&self) -> Result<Subjects, Failure> {
        let is_stdin = |path: &&PathBuf| path.as_os_str() == "-";
        if [&self.file, &self.cluster.config, &self.namespace_file].into_iter().flatten().filter(is_stdin).count() > 1 {
            return Err(Failure::Usage("stdin can be one of the files only".to_owned()));
        }
        match (&self.file, &self.pod) {
            (Some(file), name) => {
                let plain = if self.definitions.is_empty() { PLAIN } else { ATTACHMENTS };
                let conf = self.cluster.conf(plain)?;
                let pods = text(file)?;
                let namespace = self.namespace_file.as_ref().map(|path| Ok::<_, Failure>((path, text(path)?)));
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
                let found = Manifest::read(&texts, &choice).map_err(Failure::Input)?;
                if let Some(skipped) = found.skipped() {
                    let note = format_args!("{}: skipped, neither pod nor pod template: {skipped}", file.display());
                    complain(note, ExitCode::SUCCESS);
                }
                Ok(Subjects::Given(Box::new((found, conf))))
            }
            (None, Some(pod)) => Ok(Subjects::Known(Box::new(self.cluster.subject(pod)?))),
            _ => Err(Failure::Usage("name a pod: -f FILE, or -n NS POD".to_owned())),
        }
    }
}

impl ClusterArguments {
    /// The configuration, `plain` where none is named.
    fn conf(&self, plain: &str) -> Result<Applied, Failure> {
        Ok(match &self.config {
            Some(path) => Applied::read(path, &read(path)?).map_err(Failure::Input)?,
            None => NetConf::parse(plain.as_bytes(), Command::Add, "detour")?.into(),
        })
    }

    /// Asks the cluster for a pod of `--namespace`.
    ///
    /// # Errors
    /// The namespace isn't said, the configuration can't be understood, or the cluster has no answer.
    pub(super) fn subject(&self, pod: &str) -> Result<Subject, Failure> {
        let Some(namespace) = &self.namespace else {
            return Err(Failure::Usage("name the pod's namespace with -n".to_owned()));
        };
        Ok(Subject::of_cluster(self.conf(PLAIN)?, kubeconfig(self.kubeconfig.as_deref())?, (namespace, pod))?)
    }
}

/// The kubeconfig that the flag names, else that of the environment.
///
/// # Errors
/// The flag names a missing file.
fn kubeconfig(flag: Option<&Path>) -> Result<Option<PathBuf>, Failure> {
    if let Some(path) = flag {
        present("--kubeconfig", path)?;
    }
    let absolute = |path: PathBuf| {
        std::path::absolute(&path).map_err(|error| Failure::Usage(format!("{}: {error}", path.display())))
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
pub(super) fn present(flag: &str, path: &Path) -> Result<(), Failure> {
    let unread = |why| Failure::Usage(format!("{flag} {}: {why}", path.display()));
    fs::metadata(path).map(|_| ()).map_err(unread)
}

/// The file itself, or those of a directory in the order of their names.
fn manifests(place: &Path) -> Result<Vec<PathBuf>, Failure> {
    if !place.is_dir() {
        return Ok(vec![place.to_owned()]);
    }
    let failed = |error| Failure::Usage(format!("{} can't be read: {error}", place.display()));
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

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    let unread = |why: &dyn Display| Failure::Usage(format!("{} can't be read: {why}", path.display()));
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

pub(super) fn text(path: &Path) -> Result<String, Failure> {
    String::from_utf8(read(path)?).map_err(|_| Failure::Usage(format!("{} is not UTF-8", path.display())))
}
