//! One target.

/// The direction that is better.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Better {
    More,
    Less,
}

pub(super) struct Row {
    pub(super) what: &'static str,
    pub(super) figure: Option<f64>,
    pub(super) better: Better,
    pub(super) must: f64,
    pub(super) aim: f64,
    pub(super) unit: &'static str,
}

impl Row {
    /// Whether a figure reaches a limit.
    pub(super) fn reaches(&self, figure: f64, limit: f64) -> bool {
        match self.better {
            Better::More => figure >= limit,
            Better::Less => figure <= limit,
        }
    }
}

/// A ratio, which is to be at least `must`.
pub(super) fn at_least(what: &'static str, figure: Option<f64>, must: f64, aim: f64) -> Row {
    Row { what, figure, better: Better::More, must, aim, unit: "x" }
}

/// A figure which is to be at most `must`.
pub(super) fn at_most(
    what: &'static str,
    figure: Option<f64>,
    must: f64,
    aim: f64,
    unit: &'static str,
) -> Row {
    Row { what, figure, better: Better::Less, must, aim, unit }
}
