//! A part of a target, used as if it were all of it: each of several jobs has its own.

use super::{Done, Info, Request, SubmitError, Target, TargetError};

/// A part of a target. Offsets count from its start; errors name offsets in the whole.
pub(crate) struct Part<'t, B> {
    whole: &'t mut (dyn Target<B> + Send),
    first: u64,
    info: Info,
}

impl<'t, B> Part<'t, B> {
    /// The `bytes` bytes from `first`, a multiple of the target's block.
    pub(crate) fn new(whole: &'t mut (dyn Target<B> + Send), first: u64, bytes: u64) -> Self {
        let info = Info { capacity: Some(bytes), ..whole.info().clone() };
        Self { whole, first, info }
    }
}

impl<B> Target<B> for Part<'_, B> {
    fn info(&self) -> &Info {
        &self.info
    }

    fn submit(&mut self, request: Request<B>) -> Result<(), SubmitError<B>> {
        let offset = self.first.saturating_add(request.offset);
        self.whole.submit(Request { offset, ..request })
    }

    fn poll(&mut self, done: &mut Vec<Done<B>>) -> Result<(), TargetError> {
        self.whole.poll(done)
    }

    fn wait(&mut self, done: &mut Vec<Done<B>>) -> Result<(), TargetError> {
        self.whole.wait(done)
    }

    fn sync(&mut self) -> Result<(), TargetError> {
        self.whole.sync()
    }
}
