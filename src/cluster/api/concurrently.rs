//! Several answers that are waited for at the same time.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

/// All values, in the order of the futures, or the first failure, which does not wait for the others.
pub(super) async fn all<'a, T, E>(
    futures: impl IntoIterator<Item = impl Future<Output = Result<T, E>> + 'a>,
) -> Result<Vec<T>, E> {
    let mut waiting: Vec<_> = futures.into_iter().map(|future| JoinState::Waiting(Box::pin(future))).collect();
    poll_fn(|context| {
        for state in &mut waiting {
            if let JoinState::Waiting(future) = state
                && let Poll::Ready(result) = future.as_mut().poll(context)
            {
                match result {
                    Ok(value) => *state = JoinState::Done(value),
                    Err(error) => return Poll::Ready(Some(error)),
                }
            }
        }
        if waiting.iter().all(|state| matches!(state, JoinState::Done(_))) { Poll::Ready(None) } else { Poll::Pending }
    })
    .await
    .map_or(Ok(()), Err)?;
    Ok(waiting.into_iter().filter_map(JoinState::done).collect())
}

enum JoinState<F, T> {
    Waiting(Pin<Box<F>>),
    Done(T),
}

impl<F, T> JoinState<F, T> {
    fn done(self) -> Option<T> {
        match self {
            Self::Waiting(_) => None,
            Self::Done(value) => Some(value),
        }
    }
}
