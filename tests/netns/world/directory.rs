//! The world's directory for files that plugins read.

use crate::support::directory;
use std::cell::Cell;
use std::fs;
use std::path::PathBuf;

pub(super) struct Directory {
    path: directory::Directory,
    written: Cell<usize>,
}

impl Directory {
    pub(super) fn new(name: &str) -> Self {
        Self { path: directory::Directory::new(name), written: Cell::new(0) }
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
