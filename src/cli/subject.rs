//! Which pod, under which configuration: the arguments by which commands name them.

use super::Failure;
use clap::Args;
use detour_cni::cni::{Command, NetConf};
use detour_cni::inspect::{Manifest, Subject, configuration};
use std::env;
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{Read, stdin};
use std::path::{Path, PathBuf};

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
    /// The pod's manifest, after injection; - is stdin
    #[arg(short = 'f', long = "file", value_name = "POD.yaml", conflicts_with_all = ["pod", "namespace", "kubeconfig"])]
    file: Option<PathBuf>,
    /// The manifest of the pod's namespace, where the pod's own file does not hold it
    #[arg(long, value_name = "NS.yaml", requires = "file")]
    namespace_file: Option<PathBuf>,
    /// Manifests of the definitions that the pod's networks refer to; may be repeated
    ///
    /// Without --config, the pod's attachments are all that asks for something, as where Multus runs them.
    #[arg(long, value_name = "FILE|DIR", requires = "file")]
    definitions: Vec<PathBuf>,
    /// The pod that is asked of the cluster
    #[arg(value_name = "POD", requires = "namespace")]
    pod: Option<String>,
    #[command(flatten)]
    cluster: ClusterArguments,
}

/// A configuration, and the cluster that is asked.
#[derive(Debug, Args)]
pub(super) struct ClusterArguments {
    /// The plugin's configuration, a plugin list that has it, or an ADD's stdin; - is stdin
    ///
    /// Without it: type detour with its defaults.
    #[arg(long, value_name = "CONF")]
    config: Option<PathBuf>,
    /// The namespace of the pod that is asked of the cluster
    #[arg(short, long, value_name = "NS")]
    pub(super) namespace: Option<String>,
    /// How to reach the cluster; else KUBECONFIG, else what the configuration says
    #[arg(long, value_name = "PATH")]
    kubeconfig: Option<PathBuf>,
}

impl SubjectArguments {
    /// Reads the files, or asks the cluster.
    ///
    /// # Errors
    /// A file can't be read or understood, or the cluster has no answer.
    pub(super) fn read(&self) -> Result<Subject, Failure> {
        let is_stdin = |path: &&PathBuf| path.as_os_str() == "-";
        if [&self.file, &self.cluster.config, &self.namespace_file].into_iter().flatten().filter(is_stdin).count() > 1 {
            return Err(Failure::Usage("stdin can be one of the files only".to_owned()));
        }
        match (&self.file, &self.pod) {
            (Some(file), _) => {
                let plain = if self.definitions.is_empty() { PLAIN } else { ATTACHMENTS };
                let conf = self.cluster.conf(plain)?;
                let pod = text(file)?;
                let mut others: Vec<PathBuf> = self.namespace_file.iter().cloned().collect();
                for place in &self.definitions {
                    others.extend(manifests(place)?);
                }
                let others = others.into_iter().map(|path| Ok((text(&path)?, path)));
                let others = others.collect::<Result<Vec<_>, Failure>>()?;
                let others = others.iter().map(|(text, path)| (path.as_path(), text.as_str()));
                let found = Manifest::read((file, &pod), others).map_err(Failure::Input)?;
                Ok(found.subject(conf)?)
            }
            (None, Some(pod)) => self.cluster.subject(pod),
            _ => Err(Failure::Usage("name a pod: -f POD.yaml, or -n NS POD".to_owned())),
        }
    }
}

impl ClusterArguments {
    /// The configuration, `plain` where none is named.
    fn conf(&self, plain: &str) -> Result<NetConf, Failure> {
        Ok(match &self.config {
            Some(path) => configuration(path, &read(path)?).map_err(Failure::Input)?,
            None => NetConf::parse(plain.as_bytes(), Command::Add, "detour")?,
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
        Ok(Subject::of_cluster(self.conf(PLAIN)?, self.kubeconfig()?, (namespace, pod))?)
    }

    /// KUBECONFIG may be a list; its first member counts.
    fn kubeconfig(&self) -> Result<Option<PathBuf>, Failure> {
        let of_environment = || env::split_paths(&env::var_os("KUBECONFIG")?).find(|path| !path.as_os_str().is_empty());
        if let Some(path) = &self.kubeconfig {
            present("--kubeconfig", path)?;
        }
        let path = self.kubeconfig.clone().or_else(of_environment);
        let absolute = |path: PathBuf| {
            std::path::absolute(&path).map_err(|error| Failure::Usage(format!("{}: {error}", path.display())))
        };
        path.map(absolute).transpose()
    }
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
