//! What `--help` says behind the options.

macro_rules! targets {
    () => {
        "\
Targets:
  file:PATH   a file, by io_uring, past the page cache where the file system allows it; a bare PATH is the same. A block
              device is read by `copy` and `io`, and written by `io --force` where nobody else has it
  soft:SIZE   a model NVMe controller on SIZE bytes of memory: zeroes at first, gone at the end
  soft:IMAGE  the same on an image file (a name that reads as a size: soft:./512M)
  vfio:BDF    a real NVMe controller that is bound to vfio-pci: its first namespace, or vfio:BDF/NSID
"
    };
}

macro_rules! exits {
    () => {
        "
Exit codes:
  0    all went well
  1    the run failed; one line on standard error says what happened and what to do
  2    the command line asks for something that is unknown or impossible
  130  stopped by SIGINT, SIGTERM or SIGHUP, after everything unfinished was taken back; a second signal, or 10 s in which
       requests do not end (a file system that hangs), ends it without. A signal that was ignored at the start (nohup)
       stays ignored. Where the kernel itself cannot interrupt a request, the process ends with that
"
    };
}

pub(super) const SHORT: &str = "Examples: --help";

pub(super) const TOP_SHORT: &str = "Targets, exit codes, examples: --help";

pub(super) const TOP: &str = concat!(
    targets!(),
    exits!(),
    "
Sizes are whole numbers with a letter or none: 512, 4k, 8M, 1G (1k is 1024 bytes).

Examples:
  pinfold doctor
  pinfold copy big.iso copy.iso --via soft:8G --verify
  pinfold io soft:1G --rw randread --bs 4k --iodepth 32"
);

pub(super) const COPY: &str = concat!(
    targets!(),
    "
The destination is either whole or absent: it is written under a temporary name beside its own, flushed, and renamed
when all of it is on the disk; until then only its owner may open it. Where even that can not be taken back (SIGKILL, a loss of power) the temporary file
.pinfold-*.part stays, and can be removed. A destination soft:IMAGE is a new image of the source's size, filled up with zeroes to
whole blocks, one at least; with --force it replaces an image, it does not write into it. An image given with --via is written in
place; if it holds anything, only with --force. A file given with --via has no name during the run.
",
    exits!(),
    "
Examples:
  pinfold copy big.iso copy.iso
  pinfold copy big.iso copy.iso --via soft:8G --protect strict --verify
  pinfold copy big.iso soft:disk.img --bs 128k --iodepth 64
  pinfold copy soft:disk.img back.iso --force --json
  pinfold copy big.iso vfio:0000:01:00.0 --force
  pinfold copy vfio:0000:01:00.0/1 back.iso --size 700M"
);

pub(super) const IO: &str = concat!(
    targets!(),
    "
The words are fio's, and so is lat. qlat is the time to queue a request, without the call that submits it (fio's slat has it
in), and rlat the rest until its buffer is back. It ends when --size bytes have been moved or --runtime is over, whichever comes first; with
--time-based only the time counts. What an existing file, image or device holds is written over only with --force.
A file that does not exist is made with --size bytes, written once before it is read, and has no name meanwhile: whatever
ends the run, nothing is left of it. More memory than there is (--iodepth times --bs times --numjobs, and what soft:SIZE
is filled with) is refused before any is taken.
--verify writes all of --size, reads and writes anywhere in it, and reads all of it again; --runtime ends each of the three.
The first 67,108,864 blocks are written more than once (256 MiB for their counts), those behind them once.
",
    exits!(),
    "
Examples:
  pinfold io soft:1G --rw randread --bs 4k --iodepth 32 --runtime 10 --time-based
  pinfold io scratch.bin --rw randrw --rwmixread 70 --size 256M --iodepth 16
  pinfold io disk.img --rw read --bs 1M --iodepth 8 --json
  pinfold io vfio:0000:01:00.0 --rw randread --bs 4k --iodepth 64 --numjobs 2 --poll --runtime 10s --time-based
  pinfold io vfio:0000:01:00.0/1 --rw randrw --bsrange 512-1M --number-ios 10000 --size 64M --verify --force
  pinfold io soft:1G --rw randrw --bsrange 512-1M --iodepth 64 --number-ios 100000 --size 64M --verify"
);

pub(super) const DOCTOR: &str = "\
It changes nothing. What is missing is no failure: the exit code is 0 as long as the machine could be looked at.

Examples:
  pinfold doctor
  pinfold doctor --json | jq '.findings[] | select(.fix)'";

pub(super) const NVME: &str = concat!(
    "\
It starts the controller and asks it: identify controller, the list of active namespaces, identify each, and the SMART
log page. It reads and writes no data.
",
    exits!(),
    "
Examples:
  pinfold nvme soft:64M
  pinfold nvme 0000:01:00.0
  pinfold nvme vfio:0000:01:00.0 --json | jq .smart"
);

pub(super) const BIND: &str = "\
Takes each device from its driver and gives it to vfio-pci (by driver_override), or leaves everything as it was. What was
there is kept in /run/pinfold, and `pinfold unbind` puts it back. Each disk behind a device is opened exclusively until its
driver lets go, so one that anything uses (a file system, also in another mount namespace, swap, RAID, the device mapper,
a program that has it open) is left alone; so is one that cannot be opened, and a network interface that is up. --force
takes the device all the same: what is mounted loses its disk, with all that was not written yet. Needs root. To use the
device without root afterwards: sudo chown $USER /dev/vfio/GROUP, and the limit of locked memory (`pinfold doctor`).

Examples:
  pinfold bind 0000:01:00.0
  pinfold bind 01:00.0 01:00.1 --json";

pub(super) const UNBIND: &str = "\
Gives each device back to the driver that it had before `pinfold bind`; where that is not known, to the one that the
kernel chooses. A device that a program has open is left alone. Needs root.

Examples:
  pinfold unbind 0000:01:00.0";

pub(super) const POOLS: &str = "\
Reads and writes 64 MiB of a model controller on memory, and prints the DMA pools that its driver used: in the kernel's
format (poolinfo - 0.1: name, blocks in use, blocks in all, block size, chunks), then with the most that were in use at
a time. `pinfold copy --pools` prints the same of a copy.

Examples:
  pinfold pools
  pinfold pools --protect static --json";

pub(super) const BENCH: &str = "\
The subjects of a case take turns in one process, so that the ratio between two of them holds where the machine's
speed drifts; each figure is the median of the runs, with the least and the greatest beside it. In the table the
last column is the ratio to the case's first subject. Without --json the published figures for the same work follow,
then the targets, each with what was measured; without --quick, too, which changes the work. Nothing else should run meanwhile. `linear` alone takes some 20 seconds: its free is quadratic.

vfio needs a device that was given to VFIO. Behind it stand requests a second (vfio-iops), 4 KiB read anywhere with 64 in
flight, where that device is an NVMe controller, the user is root and fio is on PATH: the controller goes to the
kernel's driver for fio, and back, each round. Nothing is written to it. What is left out is said on standard error.

A line of --json:
  {\"suite\":\"pool\",\"case\":\"mpt3sas-free\",\"subject\":\"pinfold\",\"metric\":\"time\",\"unit\":\"ns/op\",
   \"median\":2.1,\"min\":2.0,\"max\":2.6,\"runs\":9}
metric: time, rate (per second), bytes, count, segments. A build with --features count-rmw counts the
read-modify-writes to shared memory for each operation instead of taking times.

Exit codes:
  0    all was measured
  1    a subject failed, or a picture could not be written; one line on standard error says why
  2    the command line asks for something that is unknown or impossible
SIGINT ends it at once: it leaves nothing behind.

Examples:
  pinfold bench
  pinfold bench pool --quick
  sudo pinfold bench vfio
  pinfold bench frame --json --runs 21 > frame.json
  pinfold bench --plot pictures";

pub(super) const COMPLETIONS: &str = "\
Examples:
  pinfold completions bash > ~/.local/share/bash-completion/completions/pinfold
  pinfold completions zsh > ~/.zfunc/_pinfold";

pub(super) const MAN: &str = "\
Examples:
  pinfold man | man -l -
  pinfold man > ~/.local/share/man/man1/pinfold.1";
