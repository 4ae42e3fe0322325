//! What a change would look like, as a unified diff.

const CONTEXT: usize = 3;

/// The change of one file as `diff -u` writes it, in one hunk; empty where there is none. `None`
/// stands for a file that is not there.
#[must_use]
pub fn unified(path: &str, before: Option<&str>, after: Option<&str>) -> String {
    let (old, new) = (lines(before), lines(after));
    if before == after {
        return String::new();
    }
    let same = |(a, b): &(&&str, &&str)| a == b;
    let head = old.iter().zip(&new).take_while(same).count();
    let tail = old[head..].iter().rev().zip(new[head..].iter().rev()).take_while(same).count();
    let from = head.saturating_sub(CONTEXT);
    let (after_old, after_new) = (old.len() - tail + tail.min(CONTEXT), new.len() - tail + tail.min(CONTEXT));
    let name = |side: &str, text: Option<&str>| text.map_or("/dev/null".into(), |_| format!("{side}{path}"));
    let mut text = format!("--- {}\n+++ {}\n", name("a", before), name("b", after));
    let range = |count: usize| format!("{},{count}", if count == 0 { from } else { from + 1 });
    text += &format!("@@ -{} +{} @@\n", range(after_old - from), range(after_new - from));
    let mut put = |sign: char, lines: &[&str]| {
        for line in lines {
            text.push(sign);
            text.push_str(line);
            if !line.ends_with('\n') {
                text.push_str("\n\\ No newline at end of file\n");
            }
        }
    };
    put(' ', &old[from..head]);
    put('-', &old[head..old.len() - tail]);
    put('+', &new[head..new.len() - tail]);
    put(' ', &old[old.len() - tail..after_old]);
    text
}

fn lines(text: Option<&str>) -> Vec<&str> {
    text.unwrap_or_default().split_inclusive('\n').collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::Write;
    use std::process::{Command, Stdio};

    #[test]
    fn a_file_that_comes_or_goes() {
        let comes = unified("/x", None, Some("a\nb\n"));
        assert_eq!(comes, "--- /dev/null\n+++ b/x\n@@ -0,0 +1,2 @@\n+a\n+b\n");
        let goes = unified("/x", Some("a"), None);
        assert_eq!(goes, "--- a/x\n+++ /dev/null\n@@ -1,1 +0,0 @@\n-a\n\\ No newline at end of file\n");
        assert_eq!(unified("/x", Some("a"), Some("a")), "");
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(40))]
        /// Whoever reads it may apply it.
        #[test]
        fn patch_understands_it(before in "([a-c]\n){1,12}", after in "([a-c]\n){0,12}[a-c]\n") {
            let directory = std::env::temp_dir().join(format!("detour-diff-{}", std::process::id()));
            fs::create_dir_all(&directory).expect("made");
            fs::write(directory.join("x"), &before).expect("written");
            let mut patch = Command::new("patch")
                .args(["-p1", "-s", "-d"])
                .arg(&directory)
                .stdin(Stdio::piped())
                .spawn()
                .expect("patch starts");
            let diff = unified("/x", Some(&before), Some(&after));
            patch.stdin.take().expect("a pipe").write_all(diff.as_bytes()).expect("written");
            proptest::prop_assert!(patch.wait().expect("it ends").success(), "{}", diff);
            let patched = fs::read_to_string(directory.join("x")).expect("read");
            fs::remove_dir_all(&directory).expect("removed");
            proptest::prop_assert_eq!(patched, after);
        }
    }
}
