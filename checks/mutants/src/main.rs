//! Changes the code in one place at a time, and reports the changes that no test detects. All of
//! them are compiled at once, each behind a switch that a run turns on, so that a change costs the
//! tests that pass it and no build.

mod compile;
mod rewrite;
mod run;
mod sites;

use clap::Parser;
use run::Outcome;
use sites::{Kind, Site};
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use std::{env, fs};

/// Finds changes of the code that no test detects.
#[derive(Parser)]
#[command(
    name = "scripts/check mutants",
    after_help = "Examples:\n  scripts/check mutants --package core --sample 150\n  scripts/check mutants --package core --file dma_pool --kinds condition,statement\n  \
                  scripts/check mutants --package core --loom --file frame\n  \
                  scripts/check mutants --package core --loom --file frame/regions --kinds statement\n  \
                  scripts/check mutants --package core --file 'map.rs split:,regions.rs split:'\n\nA survivor is a missing test or a change that does not matter: \
                  checks/mutants/survivors.txt has those, with a reason each.\nExit codes: 0 if every survivor is argued there, 1 if not, 2 if \
                  the run failed."
)]
struct Args {
    /// The crates: folders in crates/.
    #[arg(long, value_delimiter = ',', default_value = "core,nvme,capi")]
    package: Vec<String>,
    /// Only changes whose file and function contain this, or one of these: frame/map.rs, or
    /// 'map.rs split:,regions.rs split:'.
    #[arg(long, value_delimiter = ',', default_value = "")]
    file: Vec<String>,
    /// So many changes, chosen by --seed; 0: all.
    #[arg(long, default_value_t = 150)]
    sample: usize,
    /// Which ones --sample chooses.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The kinds of changes; by default all but orderings, and with --loom these alone.
    #[arg(long, value_enum, value_delimiter = ',')]
    kinds: Option<Vec<Kind>>,
    /// Runs the loom models instead of the tests: for orderings, and for what only several threads
    /// can tell.
    #[arg(long)]
    loom: bool,
    /// Lists the changes, and tries none.
    #[arg(long)]
    list: bool,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("mutants: {error}");
            ExitCode::from(2)
        }
    }
}

fn is_product(path: &Path) -> bool {
    let text = path.to_string_lossy();
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    let folder =
        ["/tests/", "/loom_models/", "/fake/", "/sync/"].iter().any(|folder| text.contains(folder));
    let named =
        ["tests.rs", "testing.rs", "known_bad.rs", "fake.rs", "model.rs", "pinfold_mutant.rs"]
            .contains(&&*file);
    text.ends_with(".rs")
        && !folder
        && !named
        && !file.starts_with("loom")
        && !file.starts_with("stress")
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            sources(&path, found)?;
        } else if is_product(&path) {
            found.push(path);
        }
    }
    Ok(())
}

/// All changes of the packages, numbered from 1.
fn all_sites(root: &Path, packages: &[String]) -> Result<Vec<Site>, Box<dyn Error>> {
    let mut files = Vec::new();
    for package in packages {
        sources(&root.join("crates").join(package).join("src"), &mut files)?;
    }
    files.sort();
    let (mut sites, mut first) = (Vec::new(), 1);
    for path in files {
        let name = path.strip_prefix(root)?.to_string_lossy().into_owned();
        let found = sites::find(&name, &fs::read_to_string(&path)?, first)?;
        first += u32::try_from(found.len())?;
        sites.extend(found);
    }
    Ok(sites)
}

/// A number that follows from the seed and the change's name, and so stays when others are added.
fn rank(seed: u64, site: &Site) -> u64 {
    site.key()
        .bytes()
        .fold(seed ^ 0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        })
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Survivors that do not matter: a key a line, and behind ` # ` the reason.
fn argued(root: &Path) -> BTreeMap<String, String> {
    let text = fs::read_to_string(root.join("checks/mutants/survivors.txt")).unwrap_or_default();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| line.rsplit_once(" # "))
        .map(|(key, why)| (key.trim().to_owned(), why.to_owned()))
        .collect()
}

fn run(args: &Args) -> Result<usize, Box<dyn Error>> {
    let root = env::current_dir()?;
    let kinds = args.kinds.clone().unwrap_or_else(|| match args.loom {
        true => vec![Kind::Ordering],
        false => vec![Kind::Operator, Kind::Condition, Kind::Statement, Kind::Number],
    });
    let mut sites = all_sites(&root, &args.package)?;
    let last = sites.iter().map(|site| site.id).max().unwrap_or(0);
    let argued = argued(&root);
    let folder = |package: &String| format!("crates/{package}/");
    let given =
        argued.keys().filter(|key| args.package.iter().any(|name| key.starts_with(&folder(name))));
    for key in given.filter(|key| sites.iter().all(|site| site.key() != **key)) {
        eprintln!("mutants: survivors.txt gives a reason for what is no change: {key}");
    }
    sites.retain(|site| {
        let key = site.key();
        args.file.iter().any(|part| key.contains(part)) && kinds.contains(&site.kind)
    });
    let all = sites.len();
    if args.sample > 0 && args.sample < all {
        sites.sort_by_key(|site| rank(args.seed, site));
        sites.truncate(args.sample);
        sites.sort_by_key(|site| site.id);
    }
    if args.list {
        for site in &sites {
            println!("{}:{}: {}", site.file, site.line, site.name);
        }
        return Ok(0);
    }
    let work = root.join(if args.loom { "target/mutants/loom" } else { "target/mutants" });
    let tree = compile::Tree {
        source: root.clone(),
        copy: work.join("tree"),
        target: work.join("target"),
        packages: args.package.clone(),
        loom: args.loom,
        last,
    };
    eprintln!("mutants: {} of {all} changes, from seed {}", sites.len(), args.seed);
    tree.copy()?;
    let mut refused = BTreeSet::new();
    let drops =
        sites.iter().filter(|site| site.name.contains("without `drop(")).map(|site| site.id);
    let drops: BTreeSet<_> = drops.collect();
    loop {
        let places = tree.write(&sites, &refused)?;
        let more = tree.refused(&places, &drops)?;
        if more.is_empty() {
            break;
        }
        refused.extend(more);
        eprintln!("mutants: {} are no Rust", refused.len());
    }
    sites.retain(|site| !refused.contains(&site.id));
    let programs = tree.programs()?;
    let filter = if args.loom { "loom" } else { "" };
    eprintln!("mutants: running {} test programs without a change", programs.len());
    let ids: Vec<_> = sites.iter().map(|site| site.id).collect();
    let (passing, suites) = run::record(&ids, &programs, &work, filter)?;
    let outcomes = attempt_all(&sites, &programs, &passing, &suites);
    report(&argued, &sites, &outcomes?, &passing, &programs)
}

/// Tries each change, two at a time.
fn attempt_all(
    sites: &[Site],
    programs: &[compile::Program],
    passing: &BTreeMap<u32, run::Passing>,
    suites: &[run::Suite],
) -> Result<BTreeMap<u32, Outcome>, Box<dyn Error>> {
    let (next, begun) = (AtomicUsize::new(0), Instant::now());
    let outcomes = Mutex::new(BTreeMap::new());
    let none = run::Passing::new();
    let work = || -> std::io::Result<()> {
        while let Some(site) = sites.get(next.fetch_add(1, Ordering::Relaxed)) {
            let by = passing.get(&site.id).unwrap_or(&none);
            let outcome = run::attempt(site.id, programs, suites, by)?;
            let mut outcomes =
                outcomes.lock().map_err(|_| std::io::Error::other("a thread panicked"))?;
            outcomes.insert(site.id, outcome);
            if outcome != Outcome::Caught {
                println!("{}:{}: {}", site.file, site.line, site.name);
            }
            if outcomes.len().is_multiple_of(25) {
                eprintln!(
                    "mutants: {} of {} tried, {} s",
                    outcomes.len(),
                    sites.len(),
                    begun.elapsed().as_secs()
                );
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(work);
        work()?;
        other.join().map_err(|_| std::io::Error::other("a thread panicked"))?
    })?;
    Ok(outcomes.into_inner().map_err(|_| "a thread panicked")?)
}

/// Prints what became of the changes; returns how many survived without a reason.
fn report(
    argued: &BTreeMap<String, String>,
    sites: &[Site],
    outcomes: &BTreeMap<u32, Outcome>,
    passing: &BTreeMap<u32, run::Passing>,
    programs: &[compile::Program],
) -> Result<usize, Box<dyn Error>> {
    let count = |outcome| outcomes.values().filter(|other| **other == outcome).count();
    println!(
        "\n{} changes: {} caught, {} survived, {} that no test reaches",
        sites.len(),
        count(Outcome::Caught),
        count(Outcome::Survived),
        count(Outcome::NotReached)
    );
    let mut open = 0;
    for site in sites {
        let outcome = outcomes.get(&site.id).copied().unwrap_or(Outcome::NotReached);
        if outcome == Outcome::Caught {
            continue;
        }
        let reached = match passing.get(&site.id) {
            None => "no test reaches it".to_owned(),
            Some(by) => format!(
                "reached in {}",
                by.keys()
                    .map(|index| programs[*index].name.as_str())
                    .collect::<Vec<_>>()
                    .join(", ")
            ),
        };
        match argued.get(&site.key()) {
            Some(why) => println!("argued    {} # {why}", site.key()),
            None => {
                open += 1;
                println!("survived  {} ({reached})", site.key());
            }
        }
    }
    Ok(open)
}
