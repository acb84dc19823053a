//! The texts of `--help`, and the man page.

use clap::{Command, CommandFactory};
use clap_mangen::Man;
use std::io;

/// The text after the options.
pub(super) struct Help {
    /// The text of `--help`.
    pub(super) long: &'static str,
    /// The text of `-h`: the examples alone, with which the other ends, too.
    pub(super) examples: &'static str,
}

macro_rules! help {
    ($name:ident: $($part:expr),* ; $examples:expr) => {
        pub(super) const $name: Help =
            Help { long: concat!($($part,)* "Examples:\n", $examples), examples: concat!("Examples:\n", $examples) };
    };
}

macro_rules! targets {
    () => {
        "\
Targets:
  file:PATH, or a bare PATH
    A file, through io_uring, with O_DIRECT where the file system allows it. A block device can be \
read; `io --force` writes it, unless something else has it open.
  soft:SIZE
    A model NVMe controller with SIZE bytes of memory: zeroed at the start, freed at the end.
  soft:IMAGE
    A model NVMe controller with an image file. (An image whose name is a size: soft:./512M.)
  soft:SIZE,OPTION... or soft:IMAGE,OPTION...
    block=4096: its blocks have 4096 bytes, instead of 512. not-ready=TIME: its namespace fails \
requests for that long after a start, which are then retried.
  vfio:BDF, or vfio:BDF/NSID
    A real NVMe controller that is bound to vfio-pci: its first namespace, or namespace NSID.

"
    };
}

macro_rules! failures {
    () => {
        "\
Exit codes:
  0    success
  1    the run failed; one line on standard error says why, and what to do
  2    the command line asks for something unknown or impossible
"
    };
}

macro_rules! second_signal {
    () => {
        "\
A second Ctrl-C, another signal more than a second later, or 10 s in which requests do not \
complete, ends the program without cleaning up. Signals that were ignored at the start (nohup) \
stay ignored.

"
    };
}

macro_rules! exits {
    () => {
        concat!(
            failures!(),
            "\
  130  stopped by SIGINT, SIGTERM, SIGHUP or SIGXCPU, after unfinished work was undone, or what \
was done was reported

",
            second_signal!()
        )
    };
}

help! { TOP:
    targets!(),
    exits!(),
    "\
Sizes are whole numbers, optionally with a suffix: 512, 4k, 8M, 1G (1k is 1024 bytes).

";
    "  pinfold doctor
  pinfold copy big.iso copy.iso --via soft:8G --verify
  pinfold io soft:1G --rw randread --bs 4k --iodepth 32"
}

help! { COPY:
    targets!(),
    "\
The destination is complete or absent: it is written under a temporary name in the same folder, \
flushed, and renamed once all of it is on the disk. Until then only its owner may open it. If the \
program cannot clean up (SIGKILL, power loss), the temporary file .pinfold-*.part remains and can \
be removed.

Holes of the source are not read and stay holes; space is reserved for the data alone. A real \
controller's namespace is written with zeroes there. --sparse never reads and writes all of them. \
--verify compares all bytes in either case.

The report has three lines, and one for each failure, fallback or hash; --details has the rest, -q \
prints errors only. It is also printed for a copy that failed or was stopped.

A destination soft:SIZE is memory that is gone when the program ends: use it to try, or with --via.

A destination soft:IMAGE is a new image of the source's size, padded with zeroes to whole blocks; \
--force replaces an existing image. What is replaced stays as it is until all is written; the new \
file is another one (inode), of the user who copies and with the source's permissions, and hard \
links keep the old contents. An image given with --via is overwritten in place, and needs --force \
if it holds data. A file given with --via has no name during the run.

",
    exits!();
    "  pinfold copy big.iso copy.iso
  pinfold copy big.iso copy.iso --via soft:8G --protect strict --verify
  pinfold copy big.iso soft:disk.img --bs 128k --iodepth 64
  pinfold copy soft:disk.img back.iso --force --json
  pinfold copy big.iso vfio:0000:01:00.0 --force
  pinfold copy vfio:0000:01:00.0/1 back.iso --size 700M"
}

help! { IO:
    targets!(),
    "\
The options that fio has too mean what they mean there. For fio's other options and its job files, \
run fio itself: its engine libpinfold-fio.so drives the same stack (docs/io.md).

Each job moves --size bytes of the same part of the target: with --numjobs 4 four times as many. \
--offset-increment gives each job a part of its own. The run ends when that has been moved or \
--runtime has passed, whichever comes first; with --time-based only the time counts. Data in an \
existing file, image or device is overwritten only with --force.

A path that does not exist, or a folder, is a scratch file with --size: it has no name during the \
run, so that nothing remains, and is written once before it is read. The reports say \"scratch \
file\". None is created under /dev, where the name of a device that does not exist would become a \
file in memory.

However the run ends, the report of what was done is printed; the exit code, and one line on \
standard error, say why it ended early.

The latencies are named as fio's: slat from preparing a request to the return of the system call, \
or the doorbell, that submits it; clat from there until the program owns its buffer again, with \
any --protect but static after its flush; lat is both. bw and iops are samples of 500 ms; a run \
that is shorter has none. docs/io-json.md lists the keys of --json.

--rw trim deallocates blocks: with Dataset Management on a controller, and by punching holes in a \
file or block device.

--verify writes all of --size, reads and writes at random in it, and reads all of it again; \
--runtime limits each of the three passes. The first 67,108,864 blocks are rewritten (their counts \
take up to 256 MiB), the others are written once.

A run that needs more memory than is available (--iodepth times --bs times --numjobs, with \
--protect batch or revoke and fewer jobs than processors up to 1 MiB more for each job, and what a \
soft:SIZE target will hold) is refused before any is allocated.

",
    exits!();
    "  pinfold io soft:1G --rw randread --bs 4k --iodepth 32 --runtime 10 --time-based
  pinfold io /var/tmp --rw randrw --rwmixread 70 --size 256M --iodepth 16
  pinfold io disk.img --rw randread --numjobs 4 --size 25% --offset-increment 25%
  pinfold io disk.img --rw read --bs 1M --iodepth 8 --json
  pinfold io vfio:0000:01:00.0 --rw randread --iodepth 64 --numjobs 2 --poll --runtime 10s --time-based
  pinfold io soft:1G --rw randrw --bsrange 512-1M --iodepth 64 --verify-requests 100000 --size 64M --verify"
}

help! { SERVE:
    targets!(),
    "\
Any NBD client can use the target: Linux (nbd-client), QEMU, libnbd (nbdcopy, nbdinfo, nbdsh), \
fio. The data of an existing file, image or device is what clients see and change; --read-only \
keeps it. A client's flush, or a write with FUA, is durable when it is answered, as far as the \
target has durable storage; a flush on one connection covers the completed writes of all.

With --tls-certificates the data is encrypted, and with --tls-verify-peer clients are \
authenticated (docs/serve.md shows how to make certificates). Without them use a Unix socket, \
whose folder decides who may connect, or an address that only trusted hosts reach.

SIGTERM or SIGINT ends the server with exit code 0, not 130: the requests that it has begun are \
answered first, for at most 5 s, and the target is flushed. The file of a Unix socket is removed; \
one that a killed server has left is replaced.

The address is printed as clients take it, with what has a meaning in a URI encoded and the path \
of a socket absolute. A name is served at all of its addresses.

--run serves while a shell command runs, which finds the address in $uri; the exit code is the \
command's, standard output is the command's alone, and the report is printed on standard error. \
After a signal the shell gets SIGTERM, and what it has started does not: write `exec COMMAND` for \
one command. Without an address, the socket is in a temporary directory. A socket that is passed \
as systemd does (LISTEN_FDS) takes the place of an address.

Blocks are as large as the file or device needs for O_DIRECT; a range that is no multiple of them \
goes through the page cache, which the server says at the start.

Payloads are received into memory that the target reads, and sent from memory that it has written; \
--buffers bounds what they use of it at a time. A quarter more is allocated, since buffers of \
several sizes leave gaps: the report's `data` line has all. Requests of up to 32 MiB are served \
whatever its size, and each client leaves memory for the next one. A client for whose requests \
there is none waits, and what it sends stays in its socket.

",
    failures!(),
    "  CODE the command of --run failed with this code
  130  ended by a second signal

",
    second_signal!();
    "  pinfold serve disk.img --nbd unix:/run/disk.sock
  pinfold serve disk.img -r -U /run/disk.sock --pidfile /run/disk.pid
  pinfold serve disk.img --run 'nbdcopy \"$uri\" copy.img'
  pinfold serve disk.img --offset 1M --length 512M --nbd unix:/run/part.sock
  systemd-socket-activate -l 10809 pinfold serve disk.img
  pinfold serve soft:1G --nbd 127.0.0.1:10809 --name scratch
  pinfold serve disk.img --nbd 0.0.0.0:10809 --tls-certificates /etc/pinfold/pki --tls-verify-peer
  pinfold serve vfio:0000:01:00.0 --nbd unix:/run/nvme.sock --read-only --threads 2
  nbdcopy 'nbd+unix:///?socket=/run/disk.sock' copy.img"
}

help! { CHECK:
    "\
The program runs unmodified, and finds a model NVMe controller or virtio disk where it would find a \
real one: in /dev/vfio, /dev/iommu and /sys. Its calls of VFIO and iommufd are answered, and the device's accesses to its memory go through what it has mapped. No device, module, \
virtual machine or source is needed; root or a user namespace, and Linux 5.19, are.

The report says, for each finding, what happened, the command and the code concerned, how to mend \
it, and the section of the specification. docs/check.md lists the findings, and what cannot be \
seen.

With --hostile SEED the device is legal and as bad as the specification allows: few and small \
queues, small transfers, completions that are late and out of order, errors that may be retried, \
data written in pieces, a failure, a removal. The same seed makes the same device. --knob sets one \
property by name, with a seed or without, and the report prints all of them; docs/check.md says \
what they mean.

Exit codes:
  the program's, if nothing is found; 128 plus the signal that ended it
  2    the command line is wrong
  3    there is a finding of the severity of --fail-on
  124  the program was killed at --time-limit
  125  check failed: nothing was checked, or the report could not be written
  130  stopped by SIGINT, SIGTERM or SIGHUP: all that the program has started was killed

";
    "  pinfold check -- qemu-img info nvme://0000:01:00.0/1
  pinfold check --nvme soft:64M --hostile 7 -- ./my-driver 0000:01:00.0
  pinfold check --knob mqes=1,dstrd=3 -- ./my-driver 0000:01:00.0
  pinfold check --virtio-blk soft:64M -- ./my-driver 0000:01:00.0
  pinfold check --nvme soft:1G -- pinfold copy --force file vfio:0000:01:00.0
"
}

help! { DOCTOR:
    "\
It tries what a run needs, as this user and in this container: a page of each kind, a ring, a \
socket with its program. It undoes that, and changes nothing. Limits of control groups and of the \
process are named by their file or their option. What cannot be read is unknown, never missing. A \
fix is printed only if it changes the value that refused, and only where it can work: in a user \
namespace, or where /sys is read-only, the line says where to run it instead.

The exit code is 0 even if something is missing.

";
    "  pinfold doctor
  pinfold doctor --json | jq '.findings[] | select(.fix)'"
}

help! { NVME:
    "\
A device file of the kernel's driver (/dev/nvme0) is refused with the address of its controller \
and the command that binds it.

It starts the controller and reports Identify Controller, the active namespaces, and the SMART log \
page. It does not read or write data.

",
    exits!();
    "  pinfold nvme soft:64M
  pinfold nvme soft:64M,block=4096
  pinfold nvme 0000:01:00.0
  pinfold nvme vfio:0000:01:00.0 --json | jq .smart"
}

help! { BIND:
    "\
Unbinds each device from its driver and binds it to vfio-pci (through driver_override), or leaves \
it unchanged. The previous driver is recorded in /run/pinfold, and `pinfold unbind` restores it. \
Needs root.

Each disk of a device is opened exclusively until its driver is unbound, so a disk that is in use \
(by a file system, also in another mount namespace, swap, RAID, the device mapper, or a program) \
is refused; so is a disk that cannot be opened, and a network interface that is up. --force binds \
the device anyway: a mounted file system loses its disk, with all data that was not yet written.

To use the device without root afterwards: sudo chown $USER /dev/vfio/GROUP, and raise the limit \
of locked memory (`pinfold doctor`).

";
    "  pinfold bind 0000:01:00.0
  pinfold bind 01:00.0 01:00.1 --json"
}

help! { UNBIND:
    "\
Binds each device to the driver that it had before `pinfold bind`; if that is not recorded, to the \
one that the kernel chooses. A device that a program has open is refused. Needs root.

";
    "  pinfold unbind 0000:01:00.0"
}

help! { POOLS:
    "\
Reads and writes 64 MiB of a model controller with memory, and prints the DMA pools of its driver: \
in the kernel's format (poolinfo - 0.1: name, blocks in use, blocks, block size, chunks), then \
with the most blocks that were in use. `pinfold copy --pools` prints the same for a copy.

";
    "  pinfold pools
  pinfold pools --protect static --json"
}

help! { REPLAY:
    "\
A trace is the text that Linux's tracer prints for the events dma:* and iommu:*; --how explains \
how to record one. Each device of the trace gets a domain of its own, and its maps and unmaps are \
made through each policy in turn, over a model of an IOMMU. The physical addresses are those of \
the trace, the I/O addresses are chosen by the policy; no data is moved. What the kernel's own \
allocator needed is the row `recorded`. docs/replay.md explains every figure.

Lines that cannot be read are left out and counted, with the numbers of the first five. Unmaps of \
what the trace does not map are left out. With --timing original the replay takes as long as the \
trace, for each policy.

Exit codes:
  0    all was replayed
  1    the trace has no usable event, or a policy failed; one line on standard error says why
  2    the command line asks for something unknown or impossible
  130  stopped by SIGINT, SIGTERM, SIGHUP or SIGXCPU; the report of the policies that were \
completed is printed, and says so

";
    "  pinfold replay --how
  pinfold replay trace.zst
  pinfold replay trace.txt --policy lazy,batch --timing original
  pinfold replay trace.gz --svg pictures
  trace-cmd report | pinfold replay - --json"
}

help! { COMPLETIONS: ;
    "  pinfold completions bash > ~/.local/share/bash-completion/completions/pinfold
  pinfold completions zsh > ~/.zfunc/_pinfold"
}

help! { MAN: ;
    "  pinfold man | man -l -
  pinfold man copy | man -l -
  pinfold man > ~/.local/share/man/man1/pinfold.1"
}

help! { RECEIVE:
    "\
The packets of the queues come to this program instead of the kernel's own stack, until it ends; \
however it ends, the kernel gets them again. An interface that carries the default route of IPv4 \
or IPv6, in any table and also below a bridge, a bond, a VLAN, a macvlan or a tunnel, is refused \
unless --force is given; so is any interface if the route leads to a tunnel that is bound to none.

It needs root, or once: sudo setcap cap_net_raw,cap_net_admin,cap_bpf,cap_ipc_lock+ep \
PATH-OF-PINFOLD (the last lifts the limit of locked memory). The card's driver writes to the \
program's pages itself where it supports that; otherwise the kernel copies each packet once. Where \
the driver refuses native XDP, packets are received in generic mode, with a note that says why.

Packets that were dropped before they reached a queue's socket are in the counters of the \
interface (ip -statistics link).

Ctrl-C ends it with its report and exit code 130, --count and --seconds with 0, a failure with its \
report and 1. What --pcap or --to has written stays, complete.

",
    exits!();
    "  pinfold receive veth1
  pinfold receive eth1 --queue 0 --seconds 10 --json
  pinfold receive eth1 --pcap packets.pcap --count 1000
  pinfold receive eth1 --to file:packets.bin --seconds 10
  pinfold receive veth1 --reflect"
}

/// Parses the name of a command that has a man page.
pub(super) fn page_of(name: &str) -> Result<String, String> {
    let cli = super::Cli::command();
    let mut names: Vec<_> = cli.get_subcommands().map(Command::get_name).collect();
    names.sort_unstable();
    if names.contains(&name) {
        Ok(name.to_owned())
    } else {
        Err(format!("no such command: name one of {}", names.join(", ")))
    }
}

/// Renders a man page from the definition of the command line: that of one command, or one for the
/// program and all its commands.
pub(crate) fn man_page(mut cli: Command, command: Option<&str>) -> io::Result<Vec<u8>> {
    cli.build();
    let mut page = Vec::new();
    let one = command.and_then(|name| cli.find_subcommand(name));
    let subject = one.unwrap_or(&cli);
    let man = Man::new(subject.clone()).title(subject.get_display_name().unwrap_or("pinfold"));
    let man = man.source(cli.render_version().trim_end()).manual("Pinfold");
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if one.is_some() {
        heading(&mut page, "NOTES");
        notes(&mut page, subject);
        heading(&mut page, "SEE ALSO");
        page.extend_from_slice(b".BR pinfold (1)\n");
        return Ok(page);
    }
    let commands = || cli.get_subcommands().filter(|command| command.get_name() != "help");
    for command in commands() {
        heading(&mut page, &format!("COMMAND {}", command.get_name().to_uppercase()));
        let man = Man::new(command.clone());
        man.render_description_section(&mut page)?;
        man.render_synopsis_section(&mut page)?;
        man.render_options_section(&mut page)?;
        page.extend_from_slice(b".SS NOTES\n");
        notes(&mut page, command);
    }
    heading(&mut page, "ALL COMMANDS");
    notes(&mut page, &cli);
    heading(&mut page, "SEE ALSO");
    for command in commands() {
        let name = escaped(command.get_name());
        page.extend_from_slice(format!(".BR pinfold\\-{name} (1)\n").as_bytes());
    }
    page.extend_from_slice(b".BR libpinfold (3)\n");
    Ok(page)
}

fn heading(page: &mut Vec<u8>, text: &str) {
    page.extend_from_slice(format!(".SH \"{text}\"\n").as_bytes());
}

/// Writes what `--help` prints after the options: paragraphs are filled, and indented as they are
/// there.
fn notes(page: &mut Vec<u8>, command: &Command) {
    let Some(text) = command.get_after_long_help() else { return };
    for line in text.to_string().lines() {
        let text = line.trim_start();
        let indent = line.len() - text.len();
        let line = match (text.is_empty(), indent) {
            (true, _) => ".sp\n".to_owned(),
            (false, 0) => format!(".br\n{}\n", escaped(text)),
            (false, _) => format!(".br\n.in +{indent}n\n{}\n.br\n.in -{indent}n\n", escaped(text)),
        };
        page.extend_from_slice(line.as_bytes());
    }
}

/// Returns the line so that troff prints it unchanged.
fn escaped(line: &str) -> String {
    let line = line.replace('\\', "\\e").replace('-', "\\-");
    if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_lines_are_escaped_for_troff() {
        assert_eq!(escaped(".fi -x \\"), "\\&.fi \\-x \\e");
    }
}
