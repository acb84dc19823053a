//! Random drivers against a simple model: what has become of each request.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug)]
enum Step {
    /// With so many payloads.
    Begin(usize),
    /// One of the payloads is refused.
    BeginRefused(usize),
    Complete(usize),
    Refuse(usize),
    Lose(usize),
    BeginLent,
    TakeBack(usize),
    CompleteLent(usize),
    DropLent(usize),
    Stop,
    Poll,
    /// This many flushes complete.
    Flush(u64),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum At {
    Device,
    Lost,
    Lent {
        is_lost: bool,
    },
    /// The driver has dropped what was lent.
    Dropped {
        is_lost: bool,
    },
    Completed,
    Held {
        is_late: bool,
    },
}

struct Model {
    /// Requests that have not been returned, with their pages.
    requests: BTreeMap<(usize, u64), (Token, At, Vec<usize>)>,
    begun: u64,
    depth: usize,
    slots: usize,
    quarantined: u64,
}

impl Model {
    fn count(&self, is: impl Fn(At) -> bool) -> usize {
        self.requests.values().filter(|(_, at, _)| is(*at)).count()
    }

    fn in_flight(&self) -> usize {
        self.count(|at| {
            matches!(at, At::Device | At::Lent { is_lost: false } | At::Dropped { is_lost: false })
        })
    }

    fn has_room(&self) -> bool {
        self.in_flight() < self.depth && self.requests.len() < self.slots
    }

    fn insert(&mut self, token: Token, at: At, pages: Vec<usize>) -> (usize, u64) {
        let key = (token.slot(), self.begun);
        self.begun += 1;
        self.requests.insert(key, (token, at, pages));
        key
    }

    fn held(&self) -> usize {
        self.count(|at| matches!(at, At::Completed | At::Held { is_late: false }))
    }

    /// Returns one of the requests that have not been returned.
    fn pick(&self, which: usize) -> Option<((usize, u64), Token, At)> {
        let all = self.requests.len();
        let (key, (token, at, _)) = self.requests.iter().nth(which % all.max(1))?;
        Some((*key, *token, *at))
    }

    fn set(&mut self, key: (usize, u64), at: At) {
        self.requests.get_mut(&key).unwrap().1 = at;
    }
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..3usize).prop_map(Step::Begin),
        1 => (1..3usize).prop_map(Step::BeginRefused),
        5 => any::<usize>().prop_map(Step::Complete),
        1 => any::<usize>().prop_map(Step::Refuse),
        1 => any::<usize>().prop_map(Step::Lose),
        2 => Just(Step::BeginLent),
        2 => any::<usize>().prop_map(Step::TakeBack),
        1 => any::<usize>().prop_map(Step::CompleteLent),
        1 => any::<usize>().prop_map(Step::DropLent),
        1 => Just(Step::Stop),
        5 => Just(Step::Poll),
        3 => (1..4u64).prop_map(Step::Flush),
    ]
}

struct Run {
    manual: Manual,
    requests: Requests<Page, 2>,
    model: Model,
    lent: Vec<((usize, u64), Lent<Page, 2>)>,
    late_at_once: bool,
    /// A poll returns all that is held.
    waits: bool,
}

impl Run {
    fn begin(&mut self, count: usize, odd: bool) {
        let page = |at: usize| match odd && at + 1 == count {
            true => (self.manual.odd_page(), Access::WRITE),
            false => (self.manual.page(), if at == 0 { Access::READ } else { Access::all() }),
        };
        let (begun, pages): (Result<Token, (usize, Refusal)>, Vec<usize>) = match count {
            0 => (self.requests.begin([]).map_err(|error| (0, error.refusal)), Vec::new()),
            1 => {
                let page = page(0);
                let pages = vec![page.0.number()];
                let failed = |error: BeginError<_, 1>| {
                    (error.payloads.iter().flatten().count(), error.refusal)
                };
                (self.requests.begin([page]).map_err(failed), pages)
            }
            _ => {
                let two = [page(0), page(1)];
                let pages = two.iter().map(|(page, _)| page.number()).collect();
                let failed = |error: BeginError<_, 2>| {
                    (error.payloads.iter().flatten().count(), error.refusal)
                };
                (self.requests.begin(two).map_err(failed), pages)
            }
        };
        let model = &mut self.model;
        let has_room = model.has_room();
        match begun {
            Ok(token) => {
                assert!(has_room && !odd);
                model.insert(token, At::Device, pages);
            }
            Err((_, Refusal::Map { .. })) => assert!(has_room && odd),
            Err((returned, Refusal::Depth { .. } | Refusal::Slots { .. })) => {
                assert!(!has_room);
                assert_eq!(returned, count);
            }
            Err((_, refusal)) => panic!("{refusal}"),
        }
    }

    /// Compares what a call has returned with the model.
    fn returned(&mut self, ended: Ended<Page, 2>) {
        let known = self.model.requests.iter().find(|(_, (token, ..))| *token == ended.token);
        let (&key, (_, at, pages)) = known.expect("a request that is not returned twice");
        match ended.end {
            End::Quiesced => {
                let got: Vec<usize> = ended.payloads.iter().flatten().map(Page::number).collect();
                assert_eq!(&got, pages);
                assert!(!ended.payloads.iter().flatten().any(|page| self.manual.reaches(page)));
                assert!(matches!(at, At::Completed | At::Held { .. }), "{at:?}");
                self.model.requests.remove(&key);
            }
            End::Late(_) => {
                assert!(ended.payloads.iter().all(Option::is_none));
                assert!(matches!(at, At::Completed | At::Held { is_late: false }), "{at:?}");
                self.model.set(key, At::Held { is_late: true });
            }
            End::Lost(error) => panic!("the unit does not fail: {error}"),
        }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Begin(count) => self.begin(count, false),
            Step::BeginRefused(count) => self.begin(count, true),
            Step::Complete(which) => {
                let Some((key, token, at)) = self.model.pick(which) else { return };
                let completed = self.requests.completed(token);
                match at {
                    At::Device | At::Lost => {
                        assert_eq!(completed, Ok(()));
                        self.model.set(key, At::Completed);
                    }
                    At::Lent { .. } | At::Dropped { .. } => {
                        assert_eq!(completed, Err(TokenError::Lent { token }));
                    }
                    At::Completed | At::Held { .. } => {
                        assert_eq!(completed, Err(TokenError::Ended { token }));
                    }
                }
            }
            Step::Refuse(which) => {
                let Some((key, token, at)) = self.model.pick(which) else { return };
                let refused = self.requests.refused(token);
                let expected = match at {
                    At::Device => None,
                    At::Lost | At::Lent { is_lost: true } | At::Dropped { is_lost: true } => {
                        Some(TokenError::Lost { token })
                    }
                    At::Lent { .. } | At::Dropped { .. } => Some(TokenError::Lent { token }),
                    At::Completed | At::Held { .. } => Some(TokenError::Ended { token }),
                };
                assert_eq!(refused.as_ref().err(), expected.as_ref(), "{at:?}");
                if let Ok(ended) = refused {
                    self.model.set(key, At::Completed);
                    self.returned(ended);
                }
            }
            Step::Lose(which) => {
                let Some((key, token, at)) = self.model.pick(which) else { return };
                let lost = match at {
                    At::Device => Some(At::Lost),
                    At::Lent { is_lost: false } => Some(At::Lent { is_lost: true }),
                    At::Dropped { is_lost: false } => Some(At::Dropped { is_lost: true }),
                    _ => None,
                };
                let refused = match at {
                    At::Completed | At::Held { .. } => TokenError::Ended { token },
                    _ => TokenError::Lost { token },
                };
                assert_eq!(self.requests.lost(token), lost.map(drop).ok_or(refused), "{at:?}");
                lost.into_iter().for_each(|lost| self.model.set(key, lost));
            }
            Step::BeginLent => {
                let page = self.manual.page();
                let pages = vec![page.number()];
                let has_room = self.model.has_room();
                match self.requests.begin_lent([(page, Access::WRITE)]) {
                    Ok(lent) => {
                        assert!(has_room);
                        let key =
                            self.model.insert(lent.token(), At::Lent { is_lost: false }, pages);
                        self.lent.push((key, lent));
                    }
                    Err(refused) => assert!(!has_room && refused.payloads[0].is_some()),
                }
            }
            Step::TakeBack(which) => {
                if self.lent.is_empty() {
                    return;
                }
                let (key, lent) = self.lent.swap_remove(which % self.lent.len());
                let At::Lent { is_lost } = self.model.requests[&key].1 else { panic!("not lent") };
                let _token = self.requests.take_back(lent).unwrap();
                self.model.set(key, if is_lost { At::Lost } else { At::Device });
            }
            Step::CompleteLent(which) => {
                if self.lent.is_empty() {
                    return;
                }
                let (key, lent) = self.lent.swap_remove(which % self.lent.len());
                self.requests.completed_lent(lent).unwrap();
                self.model.set(key, At::Completed);
            }
            Step::DropLent(which) => {
                if self.lent.is_empty() {
                    return;
                }
                let (key, lent) = self.lent.swap_remove(which % self.lent.len());
                drop(lent);
                let (_, at, pages) = &self.model.requests[&key];
                let At::Lent { is_lost } = *at else { panic!("not lent") };
                self.model.quarantined += pages.len() as u64;
                self.model.set(key, At::Dropped { is_lost });
            }
            Step::Stop => {
                self.requests.stopped();
                for (_, at, _) in self.model.requests.values_mut() {
                    if matches!(at, At::Device | At::Lost) {
                        *at = At::Completed;
                    }
                }
            }
            Step::Poll => {
                for ended in polled(&mut self.requests) {
                    self.returned(ended);
                }
                if self.waits {
                    assert_eq!(self.model.held(), 0, "it has waited for all");
                }
                for (_, at, _) in self.model.requests.values_mut() {
                    if *at == At::Completed {
                        *at = At::Held { is_late: false };
                    }
                }
                if self.late_at_once {
                    assert_eq!(self.model.count(|at| at == At::Held { is_late: false }), 0);
                } else {
                    assert_eq!(self.model.count(|at| at == At::Held { is_late: true }), 0);
                }
            }
            Step::Flush(count) => self.manual.complete(count),
        }
        assert_eq!(self.requests.in_flight(), self.model.in_flight());
        assert_eq!(self.requests.held(), self.model.held());
        let late = self.model.count(|at| at == At::Held { is_late: true });
        assert_eq!(self.requests.late(), late);
        assert_eq!(self.manual.domain.stats().quarantined, self.model.quarantined);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn random_drivers_agree_with_the_model(
        policy in prop_oneof![Just(Policy::Strict), Just(Policy::Revoke), Just(Policy::Batch)],
        (depth, held) in (1..5usize, 0..5usize),
        // Waits end at once: with the flush, or without it, as late or not.
        (obliges, late_at_once) in prop_oneof![
            Just((true, false)),
            Just((false, true)),
            Just((false, false)),
        ],
        steps in proptest::collection::vec(step(), 1..120),
    ) {
        let manual = Manual::new();
        if obliges {
            manual.oblige();
        }
        let limit = if late_at_once { Duration::ZERO } else { HOUR };
        let limits = Limits { held: Some(held), flush: limit };
        let requests = Requests::new(&manual.domain, policy, depth, limits).unwrap();
        let slots = requests.slots();
        let model = Model { requests: BTreeMap::new(), begun: 0, depth, slots, quarantined: 0 };
        let waits = obliges && policy == Policy::Strict;
        let mut run = Run { manual, requests, model, lent: Vec::new(), late_at_once, waits };
        for step in steps {
            // Without either, what is refused would be late before its time.
            let waits = matches!(step, Step::Refuse(_) | Step::BeginRefused(_));
            if waits && !late_at_once && !obliges {
                continue;
            }
            run.take(step);
        }
        let Run { manual, requests, model, lent, .. } = run;
        drop(requests);
        let pages = |is: fn(At) -> bool| -> u64 {
            let of = model.requests.values().filter(|(_, at, _)| is(*at));
            of.map(|(.., pages)| pages.len() as u64).sum()
        };
        let reached = pages(|at| matches!(at, At::Device | At::Lost));
        let quarantined = model.quarantined + reached;
        prop_assert_eq!(manual.domain.stats().quarantined, quarantined);
        let lent_pages = pages(|at| matches!(at, At::Lent { .. }));
        drop(lent);
        manual.complete_all();
        manual.domain.release_late();
        prop_assert_eq!(manual.domain.stats().quarantined, quarantined + lent_pages);
        prop_assert_eq!(manual.pages(), quarantined + lent_pages, "all others were dropped");
    }
}
