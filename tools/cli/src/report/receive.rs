//! The report of `receive`, and notes about an interface: what its packets lack, and what
//! cannot be done with them.

use super::line;
use crate::args::{ReceiveArgs, TargetSpec};
use crate::packets::counts::{Counts, Drops, NotReflected, SIZES};
use crate::packets::store::SLOT;
use crate::packets::worker::{Budget, Snapshot};
use crate::units::{counted, grouped, per_second};
use pinfold_xdp::{Attached, Interface, LinkType, Protocol, VlanTags};
use serde::Serialize;
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

/// The packets that were received, and how they were handled.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ReceiveReport {
    /// `receive`.
    pub(crate) command: &'static str,
    pub(crate) interface: String,
    pub(crate) queues: Vec<u32>,
    /// Queues that the interface got while it was received from: the kernel had their packets.
    pub(crate) queues_added: u32,
    /// The first header of packets: `ethernet` or `raw-ip`.
    pub(crate) link: &'static str,
    /// The place of reception: `native`, in the driver, or `generic`, in the network stack.
    pub(crate) xdp: &'static str,
    /// Whether the driver wrote to the pages itself.
    pub(crate) zero_copy: bool,
    /// The number of transmit queues, if the driver reports it.
    pub(crate) transmit_queues: Option<u32>,
    /// The place of VLAN tags: `in-packet`, `removed` by an offload, or `unknown`.
    pub(crate) vlan_tags: &'static str,
    /// Memory for packets in bytes, and entries of a ring, of each queue.
    pub(crate) memory_per_queue: u64,
    pub(crate) ring: u32,
    /// The notes about the interface.
    pub(crate) notes: Vec<String>,
    pub(crate) seconds: f64,
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
    pub(crate) packets_per_second: f64,
    /// Packets by protocol.
    pub(crate) protocols: BTreeMap<&'static str, u64>,
    /// Packets by size: the largest of a class in bytes, or `larger`.
    pub(crate) sizes: Vec<(String, u64)>,
    pub(crate) drops: Drops,
    /// Packets whose reply the kernel has sent, those of which it has not, and why.
    pub(crate) reflected: u64,
    pub(crate) not_reflected: u64,
    pub(crate) not_reflected_by: NotReflected,
    /// Packets in the file of `--pcap`, if there is one, and those for which it was too slow or
    /// failed.
    pub(crate) captured: Option<u64>,
    pub(crate) not_captured: u64,
    /// The target of `--to`, the packets stored there, if there is one, and those for which it had
    /// no room or that it failed to write.
    pub(crate) to: Option<String>,
    pub(crate) stored: Option<u64>,
    pub(crate) not_stored: u64,
    pub(crate) pages: Pages,
    /// Why it ended early, if something failed. Packets received before are counted and written.
    pub(crate) failure: Option<String>,
}

/// A run, apart from its packets.
#[derive(Debug)]
pub(crate) struct Run<'r> {
    pub(crate) interface: &'r Interface,
    pub(crate) tags: VlanTags,
    pub(crate) notes: Vec<String>,
    pub(crate) budget: Budget,
    pub(crate) attached: Attached,
    pub(crate) zero_copy: bool,
    pub(crate) queues: &'r [u32],
    pub(crate) queues_added: u32,
    pub(crate) elapsed: Duration,
    pub(crate) failure: Option<String>,
}

/// Pages at the end, before the sockets were closed.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Pages {
    pub(crate) total: u64,
    pub(crate) in_use: u64,
    /// Chunks that the kernel had.
    pub(crate) in_kernel: u64,
    /// The pages held, by the name of their holder.
    pub(crate) holders: BTreeMap<String, u64>,
}

fn total(snapshots: &[Snapshot]) -> (Counts, Drops, Pages) {
    let (mut counts, mut pages) = (Counts::default(), Pages::default());
    for Snapshot { counts: more, report } in snapshots {
        counts.merge(more);
        pages.total += report.pool.pages;
        pages.in_kernel += report.in_kernel;
        for holder in &report.holders {
            let name = holder.name.clone().unwrap_or_else(|| "(parts of pages)".to_owned());
            *pages.holders.entry(name).or_default() += holder.pages;
            // The sum of the holders: the pool's own count is of another moment, while packets
            // return.
            pages.in_use += holder.pages;
        }
    }
    (counts, Drops::of(snapshots.iter().map(|snapshot| snapshot.report.kernel)), pages)
}

impl ReceiveReport {
    /// Creates the report of all queues; `written` is the number of packets in the file, and `to`
    /// the target that packets were stored in.
    pub(crate) fn new(
        run: Run<'_>,
        snapshots: &[Snapshot],
        written: Option<u64>,
        to: Option<&TargetSpec>,
    ) -> Self {
        let Run { interface, tags, mut notes, budget, attached, zero_copy, queues, .. } = run;
        let Run { queues_added, elapsed, failure, .. } = run;
        let (counts, drops, pages) = total(snapshots);
        notes.extend(merged(interface.name(), attached, drops));
        let protocols = Protocol::ALL.iter().map(|protocol| protocol.name()).zip(counts.protocols);
        let limits = SIZES.iter().map(usize::to_string).chain(["larger".to_owned()]);
        Self {
            command: "receive",
            interface: interface.name().to_owned(),
            queues: queues.to_vec(),
            queues_added,
            link: if interface.link_type() == LinkType::RawIp { "raw-ip" } else { "ethernet" },
            xdp: match attached {
                Attached::Native => "native",
                Attached::Generic => "generic",
            },
            zero_copy,
            transmit_queues: interface.transmit_queues(),
            vlan_tags: match tags {
                VlanTags::InPacket => "in-packet",
                VlanTags::Beside | VlanTags::BesideBelow | VlanTags::BesideByPeer(Some(_)) => {
                    "removed"
                }
                VlanTags::BesideByPeer(None) => "unknown",
            },
            memory_per_queue: budget.bytes,
            ring: budget.ring,
            notes,
            seconds: elapsed.as_secs_f64(),
            packets: counts.packets,
            bytes: counts.bytes,
            packets_per_second: per_second(counts.packets, elapsed),
            protocols: protocols.filter(|(_, packets)| *packets > 0).collect(),
            sizes: limits.zip(counts.sizes).filter(|(_, packets)| *packets > 0).collect(),
            drops,
            reflected: counts.reflected,
            not_reflected: counts.not_reflected.total(),
            not_reflected_by: counts.not_reflected,
            captured: written,
            // Also those that were passed on to a file that failed.
            not_captured: counts.not_captured
                + counts.captured.saturating_sub(written.unwrap_or(0)),
            to: to.map(TargetSpec::to_string),
            stored: to.map(|_| counts.stored),
            not_stored: counts.not_stored,
            pages,
            failure,
        }
    }

    /// Returns the live line.
    pub(crate) fn live(snapshots: &[Snapshot], elapsed: Duration) -> String {
        let (counts, drops, pages) = total(snapshots);
        format!(
            "{}, {:.0} per second, {} dropped, {} of {} in use",
            counted(counts.packets, "packet"),
            per_second(counts.packets, elapsed),
            grouped(drops.receive_ring_full + drops.no_page + drops.other),
            grouped(pages.in_use),
            counted(pages.total, "page"),
        )
    }

    /// Formats it as text.
    pub(crate) fn to_text(&self) -> String {
        let queues = counted(self.queues.len() as u64, "queue");
        let mode = if self.zero_copy { "zero-copy" } else { "copied by the kernel" };
        let mut out = format!("receive {}: {queues}, {} XDP, {mode}\n", self.interface, self.xdp);
        if self.queues_added > 0 {
            let added = counted(self.queues_added.into(), "queue");
            line(&mut out, "not received", format_args!("{added}, added while the program ran"));
        }
        line(
            &mut out,
            "received",
            format_args!(
                "{}, {} in {:.1} s ({:.0} packets per second)",
                counted(self.packets, "packet"),
                counted(self.bytes, "byte"),
                self.seconds,
                self.packets_per_second,
            ),
        );
        let list = |entries: &mut dyn Iterator<Item = (String, u64)>| {
            entries
                .map(|(name, count)| format!("{name} {}", grouped(count)))
                .collect::<Vec<_>>()
                .join(", ")
        };
        if self.packets > 0 {
            let protocols =
                list(&mut self.protocols.iter().map(|(name, count)| ((*name).to_owned(), *count)));
            line(&mut out, "protocols", format_args!("{protocols}"));
            let to =
                |name: &str| if name == "larger" { name.to_owned() } else { format!("to {name}:") };
            let sizes = list(&mut self.sizes.iter().map(|(name, count)| (to(name), *count)));
            line(&mut out, "bytes", format_args!("{sizes}"));
        }
        let Drops { receive_ring_full, no_page, other } = self.drops;
        line(
            &mut out,
            "dropped",
            format_args!(
                "{}: {} with the receive ring full, {} without a page, {} otherwise",
                grouped(receive_ring_full + no_page + other),
                grouped(receive_ring_full),
                grouped(no_page),
                grouped(other),
            ),
        );
        if self.reflected + self.not_reflected > 0 {
            let (sent, not) = (grouped(self.reflected), grouped(self.not_reflected));
            let NotReflected { no_reply, no_transmit_queue, ring_full, not_sent } =
                self.not_reflected_by;
            let causes = [
                (no_reply, "have no reply"),
                (no_transmit_queue, "on a queue that does not transmit"),
                (ring_full, "with the transmit ring full"),
                (not_sent, "not sent by the kernel"),
            ];
            let causes = causes.iter().filter(|(count, _)| *count > 0);
            let causes: Vec<_> =
                causes.map(|(count, cause)| format!("{} {cause}", grouped(*count))).collect();
            let causes =
                if causes.is_empty() { String::new() } else { format!(": {}", causes.join(", ")) };
            line(&mut out, "reflected", format_args!("{sent} packets, {not} not sent{causes}"));
        }
        if let Some(captured) = self.captured {
            let (captured, not) = (grouped(captured), grouped(self.not_captured));
            line(
                &mut out,
                "in the file",
                format_args!(
                    "{captured} packets, {not} left out because the file was too slow or failed"
                ),
            );
        }
        if let (Some(to), Some(stored)) = (&self.to, self.stored) {
            let (stored, not) = (counted(stored, "packet"), grouped(self.not_stored));
            line(
                &mut out,
                "stored",
                format_args!(
                    "{stored} in {to}, a slot of {SLOT} bytes for each, {not} without room or failed"
                ),
            );
        }
        let holders =
            list(&mut self.pages.holders.iter().map(|(name, pages)| (name.clone(), *pages)));
        let Pages { total, in_use, in_kernel, .. } = &self.pages;
        let (in_use, in_kernel) = (grouped(*in_use), grouped(*in_kernel));
        line(
            &mut out,
            "pages",
            format_args!(
                "{in_use} of {} in use ({holders}); the kernel has {in_kernel} chunks",
                grouped(*total)
            ),
        );
        for note in &self.notes {
            line(&mut out, "note", format_args!("{note}"));
        }
        out
    }
}

/// Returns the notices known before the first packet.
pub(crate) fn notes_at_start(
    args: &ReceiveArgs,
    interface: &Interface,
    queues: Range<u32>,
    tags: &VlanTags,
) -> Vec<String> {
    let kept = match (&args.pcap, &args.to) {
        (Some(_), _) => Some("in the capture"),
        (_, Some(_)) => Some("stored"),
        _ if args.reflect => Some("in the replies"),
        _ => None,
    };
    let without = kept.and_then(|kept| without_tags(interface.name(), kept, tags));
    let silent = if args.reflect { without_transmit(interface, queues) } else { None };
    without.into_iter().chain(silent).collect()
}

fn without_tags(name: &str, kept: &str, tags: &VlanTags) -> Option<String> {
    const OFF: &str = "txvlan off tx-vlan-stag-hw-insert off";
    match tags {
        VlanTags::InPacket => None,
        VlanTags::Beside => Some(format!(
            "VLAN tags are taken out of the packets by {name} (rxvlan) and are not {kept}: `sudo ethtool -K {name} rxvlan off` \
             keeps them"
        )),
        VlanTags::BesideBelow => Some(format!(
            "VLAN tags are taken out of the packets before they reach {name}, and are not {kept}: receive from an interface below it \
             to keep them"
        )),
        VlanTags::BesideByPeer(Some(peer)) => Some(format!(
            "VLAN tags are left out of the packets by {peer}, the other end of {name} (txvlan), and are not {kept}: `sudo ethtool \
             -K {peer} {OFF}` keeps them"
        )),
        VlanTags::BesideByPeer(None) => Some(format!(
            "VLAN tags are not {kept}, unless the other end of {name}, in another network namespace, keeps them: `sudo ethtool -K \
             PEER {OFF}` there, with its name"
        )),
    }
}

fn without_transmit(interface: &Interface, queues: Range<u32>) -> Option<String> {
    let transmit = interface.transmit_queues()?;
    let first = transmit.max(queues.start);
    let silent = match queues.end.checked_sub(first)? {
        0 => return None,
        1 => format!("queue {first} are"),
        _ => format!("queues {first} to {} are", queues.end - 1),
    };
    let name = interface.name();
    Some(format!(
        "{name} has {}: packets of {silent} counted and not sent back; `sudo ethtool --set-channels {name} tx {}` adds transmit \
         queues where the driver has them",
        counted(transmit.into(), "transmit queue"),
        queues.end
    ))
}

/// Returns the note of packets larger than a chunk, if there are any: the MTU was checked, so in
/// generic mode the network stack has merged them.
pub(crate) fn merged(name: &str, attached: Attached, drops: Drops) -> Option<String> {
    (attached == Attached::Generic && drops.other > 0).then(|| {
        format!(
            "{} dropped that were larger than a chunk: in generic mode the network stack passes on what it has merged beyond the MTU; \
             `sudo ethtool -K {name} gro off`, likewise for an interface below {name}, and `sudo ethtool -K PEER gso off tso off \
             tx-udp-segmentation off` on the other end of a virtual link prevent that",
            counted(drops.other, "packet")
        )
    })
}

/// Says once, while the program runs, that merged packets are dropped.
#[derive(Debug)]
pub(crate) struct Merged<'n> {
    name: &'n str,
    attached: Attached,
    is_told: bool,
}

impl<'n> Merged<'n> {
    pub(crate) fn new(name: &'n str, attached: Attached) -> Self {
        Self { name, attached, is_told: false }
    }

    pub(crate) fn look(&mut self, snapshots: &[Snapshot]) {
        if !self.is_told
            && let Some(note) = merged(
                self.name,
                self.attached,
                Drops::of(snapshots.iter().map(|snapshot| snapshot.report.kernel)),
            )
        {
            self.is_told = true;
            tracing::warn!("{}: {note}", self.name);
        }
    }
}
