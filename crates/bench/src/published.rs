//! Published figures for the same work, beside those of a run.
//!
//! They come from other machines, so ratios are only taken within a column.

use crate::record::{Metric, Record};
use crate::suite::pool;
use std::fmt;

/// "mpt3sas and dmapool scalability", patches to the DMA pools of Linux, June 2022: the code they
/// replaced and their result, in milliseconds for all allocations, and for all frees with the
/// destruction of the pool.
const DMA_POOL: [(&str, f64, f64); 2] =
    [("published: original", 350.0, 8901.0), ("published: red-black tree", 18.0, 19.0)];

/// "Introduce a bulk order-0 page allocator" for Linux, March 2021: microseconds per refill call of
/// an RPC server.
const RPC: [(&str, f64); 3] = [("single", 25.007), ("list", 6.258), ("array", 4.590)];

/// The same patches, in the page pool of a network driver: packets per second through an XDP
/// program that drops them.
const XDP: [(&str, f64); 3] =
    [("single", 3_771_046.0), ("list", 3_940_242.0), ("array", 4_249_224.0)];

/// The published tables for which `records` has figures, beside those figures.
///
/// After a quick run the table of the pools is omitted: the workload is smaller, and one subject is
/// quadratic.
#[derive(Clone, Copy, Debug)]
pub struct Published<'r> {
    /// The records of a run.
    pub records: &'r [Record],
    /// Whether it was a quick run.
    pub quick: bool,
}

impl Published<'_> {
    fn times<'r>(&'r self, suite: &'r str, case: &'r str) -> impl Iterator<Item = &'r Record> {
        self.records
            .iter()
            .filter(move |r| (r.suite, r.case, r.metric) == (suite, case, Metric::Time))
    }
}

impl fmt::Display for Published<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.quick {
            self.dma_pool(f)?;
        }
        self.rpc(f)?;
        self.xdp(f)
    }
}

impl Published<'_> {
    fn dma_pool(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        #[expect(clippy::cast_precision_loss, reason = "373,959")]
        let ms = |ns_each: f64| ns_each * pool::BLOCKS as f64 / 1e6;
        let mut rows = self
            .times("pool", "mpt3sas-alloc")
            .filter_map(|alloc| {
                let free = self
                    .times("pool", "mpt3sas-free")
                    .find(|free| free.subject == alloc.subject)?;
                Some((alloc.subject, ms(alloc.median), ms(free.median)))
            })
            .peekable();
        if rows.peek().is_none() {
            return Ok(());
        }
        writeln!(
            f,
            "\n{} blocks of {} bytes, ms{:>16}{:>16}",
            pool::BLOCKS,
            pool::SIZE,
            "alloc all",
            "free all"
        )?;
        for (name, alloc, free) in DMA_POOL {
            writeln!(f, "{name:<30}{alloc:>16.0}{free:>16.0}")?;
        }
        rows.try_for_each(|(name, alloc, free)| {
            let here = format!("here: {name}");
            writeln!(f, "{here:<30}{alloc:>16.2}{free:>16.2}")
        })
    }

    fn rpc(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let here = |subject| {
            self.times("frame", "rpc-259").find(|r| r.subject == subject).map(|r| r.median / 1e3)
        };
        let Some(single_here) = here("single") else { return Ok(()) };
        writeln!(
            f,
            "\n{:<18}{:>14}{:>14}{:>14}{:>14}",
            "259 pages, refill", "published, µs", "single is", "here, µs", "single is"
        )?;
        let single = RPC[0].1;
        for (name, published) in RPC {
            let Some(ours) = here(name) else { continue };
            let (then, now) = (single / published, single_here / ours);
            writeln!(f, "{name:<18}{published:>14.3}{then:>13.2}x{ours:>14.3}{now:>13.2}x")?;
        }
        Ok(())
    }
}

impl Published<'_> {
    fn xdp(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let here = |subject| {
            self.times("page-pool", "rx-512").find(|r| r.subject == subject).map(|r| 1e9 / r.median)
        };
        let Some(single_here) = here("single") else { return Ok(()) };
        writeln!(
            f,
            "\n{:<18}{:>14}{:>14}{:>14}{:>14}",
            "receive path", "published, /s", "to single", "here, /s", "to single"
        )?;
        let single = XDP[0].1;
        for (name, published) in XDP {
            let Some(ours) = here(name) else { continue };
            let (then, now) = (published / single, ours / single_here);
            writeln!(f, "{name:<18}{published:>14.0}{then:>13.2}x{ours:>14.0}{now:>13.2}x")?;
        }
        let Some(ours) = here("pinfold") else { return Ok(()) };
        writeln!(
            f,
            "{:<18}{:>14}{:>14}{ours:>14.0}{:>13.2}x",
            "pinfold",
            "",
            "",
            ours / single_here
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(
        suite: &'static str,
        case: &'static str,
        subject: &'static str,
        median: f64,
    ) -> Record {
        Record::of_runs(suite, case, subject, Metric::Time, median)
    }

    #[test]
    fn a_table_has_the_published_figures_beside_ours() {
        let records = [
            record("pool", "mpt3sas-alloc", "linear", 1_000.0),
            record("pool", "mpt3sas-free", "linear", 20_000.0),
            record("frame", "rpc-259", "single", 10_000.0),
            record("frame", "rpc-259", "array", 500.0),
            record("page-pool", "rx-512", "single", 100.0),
            record("page-pool", "rx-512", "pinfold", 50.0),
        ];
        let text = Published { records: &records, quick: false }.to_string();
        let row = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap();
            line[name.len()..].split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(row("published: original"), ["350", "8901"]);
        assert_eq!(row("here: linear"), ["373.96", "7479.18"]);
        assert_eq!(row("array"), ["4.590", "5.45x", "0.500", "20.00x"]);
        assert_eq!(row("pinfold"), ["20000000", "2.00x"]);
        let quick = Published { records: &records, quick: true }.to_string();
        assert!(!quick.contains("8901") && quick.contains("25.007"));
    }

    #[test]
    fn tables_without_measured_figures_are_omitted() {
        let records = [record("pool", "pair-64", "pinfold", 4.0)];
        assert_eq!(Published { records: &records, quick: false }.to_string(), "");
    }
}
