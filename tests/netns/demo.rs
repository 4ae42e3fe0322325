//! `hack/demo.sh`: its table is that of README.md, the commands that it prints work on the scene that it keeps, and
//! removing the scene leaves nothing.

use std::path::Path;
use std::process::{Command, Output};

/// Runs a script with an empty /run of its own.
fn run(script: &str) -> Output {
    let binaries = Path::new(env!("CARGO_BIN_EXE_detour")).parent().expect("a directory");
    let script = format!("set -e; mount -t tmpfs none /run\n{script}");
    let mut command = Command::new("unshare");
    command.args(["--mount", "bash", "-c", &script, "demo"]).arg(binaries).current_dir(env!("CARGO_MANIFEST_DIR"));
    command.env_remove("IN_OWN_MOUNTS").output().expect("unshare(1)")
}

#[test]
fn the_demo_prints_the_table_of_the_first_page_and_leaves_nothing() {
    let output = run("hack/demo.sh --binaries \"$1\"; find /run -mindepth 1 ! -path '/run/mount*'");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    assert!(text.lines().count() <= 20, "{text}");
    let readme = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).expect("readable");
    let table = text.split("\n\n").find(|part| part.contains("without exclusions   ")).expect("a table");
    assert!(readme.contains(&format!("```text\n{table}\n```\n")), "README.md has another table than\n{table}");
    assert!(text.contains("All 40 connections") && text.contains("/detour\nNext:   hack/demo.sh --keep "), "{text}");
    assert!(text.ends_with("try explain, trace and rules on it\n"), "/run contains files: {text}");
}

#[test]
fn the_printed_commands_work_on_a_kept_scene_and_removing_it_leaves_nothing() {
    // A second scene is an error. The scene's processes do not keep the pipe of stdout open.
    let output = run(r#"
        export SCENE=$$
        hack/demo.sh -v --keep --binaries "$1" | cat >/tmp/demo-$$
        printed=$(cat /tmp/demo-$$; rm /tmp/demo-$$)
        echo "$printed"
        ! hack/demo.sh --keep --binaries "$1"
        ls -x /run/netns
        eval "$(sed -n 's/^  \(cd\|\.\/detour\) /\1 /p' <<<"$printed")"
        eval "$(sed -n 's/^Remove: //p' <<<"$printed")"
        echo "left: $(find /run -mindepth 1 ! -path '/run/mount*' ! -path /run/netns)"
        for process in /proc/[0-9]*; do
            if [[ $(cat $process/comm 2>&1) == probe ]] && grep -qs "SCENE=$SCENE" $process/environ; then
                echo "left: $process"
            fi
        done
    "#);
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}\n{errors}");
    assert_eq!(errors, "demo.sh: /run/detour-demo exists; remove it first: hack/demo.sh --remove\n");
    assert_eq!(text.lines().filter(|line| line.starts_with("    ") && line.ends_with(" ok")).count(), 40, "{text}");
    for part in [
        "detour-demo-outside  detour-demo-pod\n",
        "Pod shop/web-0 is redirected",
        "10.96.0.10:53/udp from uid 1337, gid 0 via eth0 → direct\n",
        "/run/netns/detour-demo-pod: rules are as desired\n",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(text.ends_with("\nleft: \n"), "{text}");
    let again = run("hack/demo.sh --remove");
    assert_eq!(String::from_utf8_lossy(&again.stderr), "demo.sh: nothing to remove: /run/detour-demo not found\n");
}
