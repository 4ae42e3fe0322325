//! Processes and repeated work that end with the value that stands for them.

use std::process::Child;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// A process that is killed when it is dropped.
pub(crate) struct Running(pub(crate) Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Work that a thread repeats until this is dropped.
pub(crate) struct Repeated {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Repeated {
    /// Does `work` from now on, with this pause in between.
    pub(crate) fn start(pause: Duration, mut work: impl FnMut() + Send + 'static) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&ends);
        let thread = thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                work();
                thread::park_timeout(pause);
            }
        });
        Self { ends, thread: Some(thread) }
    }

    /// Ends the work, which must not have failed.
    #[track_caller]
    pub(crate) fn end(mut self) {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.take().expect("it runs").join().expect("the work succeeds");
    }
}

impl Drop for Repeated {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join);
    }
}
