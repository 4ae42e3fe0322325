//! The world's directory for files that plugins read.

use std::cell::Cell;
use std::fs;
use std::path::PathBuf;

pub(super) struct Directory {
    path: PathBuf,
    written: Cell<usize>,
}

impl Directory {
    pub(super) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap_or_else(|e| panic!("make {}: {e}", path.display()));
        Self { path, written: Cell::new(0) }
    }

    /// Writes each text to its own file in a new subdirectory.
    pub(super) fn write(&self, texts: &[&str]) -> PathBuf {
        let number = self.written.replace(self.written.get() + 1);
        let below = self.path.join(number.to_string());
        fs::create_dir(&below).expect("make a directory");
        for (number, text) in texts.iter().enumerate() {
            fs::write(below.join(format!("{number}.yaml")), text).expect("write a file");
        }
        below
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            eprintln!("remove {}: {error}", self.path.display());
        }
    }
}
