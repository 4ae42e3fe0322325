//! The connections that a server of the agent has open: a limited number, in which silent clients can't
//! keep others out.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::task::{AbortHandle, JoinSet, yield_now};

/// Connections, the oldest first.
#[derive(Debug)]
pub(super) struct Connections {
    limit: usize,
    tasks: JoinSet<()>,
    open: Vec<(AbortHandle, Busy)>,
}

/// Whether a connection has work in progress, which keeps it from being closed for another one.
#[derive(Debug, Clone, Default)]
pub(super) struct Busy(Arc<AtomicBool>);

impl Busy {
    /// The request has arrived.
    pub(super) fn begin(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn is(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Connections {
    /// At most `limit` connections.
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, tasks: JoinSet::new(), open: Vec::new() }
    }

    /// Waits until one more connection can be served: there are fewer than the limit, or one of them is
    /// idle.
    pub(super) async fn room(&mut self) {
        // A burst of connections must not close one that has not been read from yet.
        yield_now().await;
        loop {
            while self.tasks.try_join_next().is_some() {}
            self.open.retain(|(task, _)| !task.is_finished());
            if self.open.len() < self.limit || self.open.iter().any(|(_, busy)| !busy.is()) {
                return;
            }
            self.tasks.join_next().await;
        }
    }

    /// Serves a connection; at the limit, closes the oldest idle one for it.
    pub(super) fn serve<F: Future<Output = ()> + Send + 'static>(&mut self, work: impl FnOnce(Busy) -> F) {
        if self.open.len() >= self.limit
            && let Some(oldest) = self.open.iter().position(|(_, busy)| !busy.is())
        {
            self.open.remove(oldest).0.abort();
        }
        let busy = Busy::default();
        let task = self.tasks.spawn(work(busy.clone()));
        self.open.push((task, busy));
    }

    /// Closes the idle connections, and waits until the others have ended.
    pub(super) async fn finish(&mut self) {
        self.open.iter().filter(|(_, busy)| !busy.is()).for_each(|(task, _)| task.abort());
        while self.tasks.join_next().await.is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::pending;
    use std::time::Duration;
    use tokio::sync::oneshot;
    use tokio::time::timeout;

    /// Tells by its end that a connection was closed.
    type Closed = oneshot::Receiver<()>;

    async fn add(connections: &mut Connections, is_busy: bool) -> Closed {
        let (open, closed) = oneshot::channel::<()>();
        connections.room().await;
        connections.serve(|busy| async move {
            let _open = open;
            if is_busy {
                busy.begin();
            }
            pending().await
        });
        yield_now().await;
        closed
    }

    #[tokio::test]
    async fn at_the_limit_the_oldest_idle_connection_is_closed() {
        let mut connections = Connections::new(3);
        let mut busy = add(&mut connections, true).await;
        let (first, mut second) = (add(&mut connections, false).await, add(&mut connections, false).await);
        let mut third = add(&mut connections, false).await;
        first.await.expect_err("closed");
        for open in [&mut busy, &mut second, &mut third] {
            assert_eq!(open.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        }
    }

    #[tokio::test]
    async fn with_all_connections_busy_the_next_one_waits() {
        let mut connections = Connections::new(2);
        let (ends, end) = oneshot::channel::<()>();
        connections.serve(|busy| async move {
            busy.begin();
            let _ = end.await;
        });
        let _busy = add(&mut connections, true).await;
        timeout(Duration::from_millis(10), connections.room()).await.expect_err("no room");
        drop(ends);
        connections.room().await;
    }

    #[tokio::test]
    async fn at_the_end_only_busy_connections_are_waited_for() {
        let mut connections = Connections::new(2);
        let idle = add(&mut connections, false).await;
        let (ends, end) = oneshot::channel::<()>();
        connections.serve(|busy| async move {
            busy.begin();
            let _ = end.await;
        });
        yield_now().await;
        timeout(Duration::from_millis(10), connections.finish()).await.expect_err("one is busy");
        idle.await.expect_err("closed");
        drop(ends);
        connections.finish().await;
    }
}
