//! `detour doctor`

use super::install::NodeArguments;
use super::output::OutputArguments;
use super::subject::{kubeconfig_of_environment, present};
use super::{CommandError, CommandOutput};
use clap::{ArgAction, Args};
use detour_cni::agent::install::{InstallLog, Platform, Role, changed};
use detour_cni::host_path::{HostPath, HostRoot};
use detour_cni::inspect::doctor::{CheckTarget, Installation, examine};
use detour_cni::pod::PodRef;
use detour_cni::trusted_file::{overwrite, read_nofollow, read_text};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs, io};

const EXAMPLES: &str = "\
Examples:
  detour doctor                  this node: what is installed, the API and its rights, the kernel
  detour doctor -n shop web-0    that, and the pod: from its annotation to the rules in the kernel
  detour doctor -n shop web-0 --probe
        and real packets in its namespace, to addresses that nobody has, as captured and as
        excluded users
  detour doctor -n shop web-0 --bundle web-0.tar
        all that was found as an archive without tokens, keys and certificates
  kubectl exec -n kube-system detour-agent-x7k2p -- /detour doctor --root /host -n shop web-0
        in the agent's pod on the node; printed, as oc debug is, where the pod is on another node

Needs root for the kernel's part and the pod's, and changes nothing. What needs another check that
failed is not checked, and says so. The agent's container can do all of it while the agent repairs
pods (the chart's repair.enabled), except read log files and the journal; its only place for a
bundle is /run/detour, the node's own. The pod is asked for with --kubeconfig, else KUBECONFIG,
else ~/.kube/config, else, in a pod, as its service account, else with the plugin's own kubeconfig,
which may not see everything.
Exit codes: 0 nothing failed, 1 something did, 2 wrong usage or input.";

/// A name has at most 64 bytes (gethostname(2)); hostname(5) allows comments beside it.
const LARGEST_NAME: u64 = 4 << 10;

/// What is wrong with a node or a pod, as a list of checks
///
/// Each line says whether it holds, what was found and, where it does not, what to do next.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct DoctorArguments {
    /// The node alone, which is what is looked at where no pod is named
    #[arg(long, conflicts_with = "pod")]
    node: bool,
    /// The pod's namespace
    #[arg(short, long, value_name = "NS", requires = "pod")]
    namespace: Option<String>,
    /// The pod
    #[arg(value_name = "POD", requires = "namespace")]
    pod: Option<String>,
    /// Send packets in the pod's network namespace and see where they go
    #[arg(long, requires = "pod")]
    probe: bool,
    /// Write all that was found to this file, as a tar without secrets
    #[arg(long, value_name = "FILE")]
    bundle: Option<PathBuf>,
    /// The plugin's configuration on the node, or the directory that it is in
    #[arg(long, value_name = "FILE|DIR")]
    conf: Option<HostPath>,
    /// How to ask the cluster about the pod
    #[arg(long, value_name = "PATH")]
    kubeconfig: Option<PathBuf>,
    /// The kind of node; else it is detected
    #[arg(long, value_name = "NAME", value_parser = Platform::named)]
    platform: Option<&'static Platform>,
    /// Whether the plugin is a member of the cluster network's list
    #[arg(long, value_name = "BOOL", action = ArgAction::Set)]
    chained: Option<bool>,
    /// Where the node's runtime, or Multus, looks for plugins
    #[arg(long, value_name = "DIR")]
    bin_dir: Option<HostPath>,
    /// The node's name in the cluster [default: $NODE_NAME, else the host's]
    #[arg(long, value_name = "NAME")]
    node_name: Option<String>,
    #[command(flatten)]
    place: NodeArguments,
    #[command(flatten)]
    output: OutputArguments,
}

/// The list; exit code 1 where something failed.
pub(super) fn run(arguments: &DoctorArguments) -> Result<CommandOutput, CommandError> {
    arguments.place.check_root()?;
    if let Some(path) = &arguments.conf {
        let reached =
            arguments.place.node().reach(path).map_err(|why| CommandError::Usage(format!("--conf {path}: {why}")))?;
        fs::metadata(reached).map_err(|why| CommandError::Usage(format!("--conf {path}: {why}")))?;
    }
    if let Some(path) = &arguments.kubeconfig {
        present("--kubeconfig", path)?;
    }
    // Before packets are sent for nothing.
    let bundle = arguments.bundle.as_deref().map(|path| overwrite(path).map_err(|why| unwritten(path, &why)));
    let bundle = bundle.transpose()?;
    let case = arguments.case();
    let examination = examine(&case);
    if let (Some(path), Some(mut file)) = (&arguments.bundle, bundle) {
        file.write_all(&examination.bundle(&case)?).map_err(|why| unwritten(path, &why))?;
    }
    let answer = arguments.output.answer(&examination.checklist)?;
    let code = if examination.checklist.healthy { answer.code } else { ExitCode::FAILURE };
    Ok(CommandOutput { code, ..answer })
}

fn unwritten(path: &Path, why: &io::Error) -> CommandError {
    CommandError::Usage(format!("--bundle {}: it can't be written: {why}", path.display()))
}

impl DoctorArguments {
    fn case(&self) -> CheckTarget {
        let node = self.place.node();
        let platform = self.platform.unwrap_or_else(|| Platform::detect(|path| node.has(path)));
        let found = node.look(None);
        let record = found.as_ref().map(|found| found.record.clone()).unwrap_or_default();
        let is_empty = record.files.is_empty() && record.lists.is_empty();
        let usual = |path: &str| HostPath::new(path).into_iter().collect::<Vec<_>>();
        let programs = programs(&record);
        let mut bin_dirs: Vec<HostPath> = self.bin_dir.clone().into_iter().collect();
        if bin_dirs.is_empty() {
            bin_dirs = programs.iter().map(HostPath::parent).collect();
            bin_dirs.dedup();
        }
        if bin_dirs.is_empty() {
            bin_dirs = usual(platform.bin_dir);
        }
        let conf = self.conf.clone().or_else(|| conf_dir(&record)).or_else(|| usual(platform.conf_dir).pop());
        let names = self.namespace.clone().zip(self.pod.clone());
        CheckTarget {
            mount: self.place.root().to_owned(),
            node_name: self.node_name.clone().or_else(|| host_name(self.place.root())),
            platform: platform.name.to_owned(),
            chained: self.chained.unwrap_or(if is_empty { platform.chained } else { !record.lists.is_empty() }),
            bin_dirs,
            conf: conf.unwrap_or_else(|| self.place.log().parent()),
            installation: Installation {
                log: self.place.log(),
                programs,
                changed: found.map(|found| (!is_empty).then(|| changed(&found))).map_err(|error| error.to_string()),
            },
            kubeconfig: self.kubeconfig.clone().or_else(kubeconfig_of_environment),
            pod: names.map(|(namespace, name)| PodRef { namespace, name, uid: None }),
            probe: self.probe,
        }
    }
}

fn programs(record: &InstallLog) -> Vec<HostPath> {
    let programs = record.files.iter().filter(|(_, owned)| owned.role == Role::Program);
    programs.map(|(path, _)| path.clone()).collect()
}

fn conf_dir(record: &InstallLog) -> Option<HostPath> {
    let own = record.files.iter().find(|(_, owned)| owned.role == Role::Configuration);
    own.map(|(path, _)| path).or(record.lists.keys().next()).map(HostPath::parent)
}

/// The name that a kubelet takes unless told otherwise. The running kernel's is this process's own, which in
/// a pod is the pod's.
fn host_name(root: &Path) -> Option<String> {
    let of_kernel = || read_text(Path::new("/proc/sys/kernel/hostname"), LARGEST_NAME).ok();
    let own = (root == Path::new("/")).then(of_kernel).flatten();
    let of_file = || {
        let reached = HostRoot::new(root).reach(&HostPath::new("/etc/hostname")?).ok()?;
        String::from_utf8(read_nofollow(&reached, LARGEST_NAME).ok()?).ok()
    };
    let names = own.into_iter().chain(of_file()).map(|text| text.trim().to_lowercase());
    env::var("NODE_NAME").ok().into_iter().chain(names).find(|name| !name.is_empty())
}
