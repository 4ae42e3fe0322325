//! An archive of texts in the format that every tar reads (POSIX.1-1988, "ustar").

const BLOCK: usize = 512;
/// The archive's programs read it in records of so many bytes.
const RECORD: usize = 20 * BLOCK;
/// What a name may have, in bytes.
const LONGEST_NAME: usize = 99;

/// The archive of these files, each of a name and its contents; `time` is when, in seconds since 1970.
pub(super) fn archive(files: &[(String, Vec<u8>)], time: u64) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, contents) in files {
        out.extend(header(name, contents.len(), time));
        out.extend(contents);
        out.resize(out.len().next_multiple_of(BLOCK), 0);
    }
    out.resize((out.len() + 2 * BLOCK).next_multiple_of(RECORD), 0);
    out
}

fn header(name: &str, length: usize, time: u64) -> [u8; BLOCK] {
    let mut header = [0; BLOCK];
    let name: Vec<u8> = name.bytes().take(LONGEST_NAME).collect();
    let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &name);
    put(100, b"0000600\0");
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    put(124, format!("{length:011o}\0").as_bytes());
    put(136, format!("{time:011o}\0").as_bytes());
    // The sum counts its own field as blanks.
    put(148, b"        ");
    put(156, b"0");
    put(257, b"ustar\x0000");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn tar_reads_it() {
        let path = std::env::temp_dir().join(format!("detour-ustar-{}.tar", std::process::id()));
        let long = vec![b'x'; 1000];
        let files = [("a/one.json".to_owned(), b"{}\n".to_vec()), ("a/two".to_owned(), long.clone())];
        std::fs::write(&path, archive(&files, 1_000_000_000)).expect("written");
        let tar = |arguments: &[&str]| {
            let output = Command::new("tar").args(arguments).arg("-f").arg(&path).env("TZ", "UTC").output();
            let output = output.expect("tar starts");
            assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
            output.stdout
        };
        let list = String::from_utf8(tar(&["-tv"])).expect("text");
        assert!(list.contains("2001-09-09 01:46 a/one.json") && list.lines().count() == 2, "{list}");
        assert_eq!(tar(&["-xO"]), [b"{}\n".to_vec(), long].concat());
        let _ = std::fs::remove_file(path);
    }
}
