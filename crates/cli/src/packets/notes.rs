//! What a user is told of an interface: what its packets lack, and what cannot be done with them.

use super::counts::Drops;
use super::worker::Snapshot;
use crate::args::ReceiveArgs;
use crate::units::counted;
use pinfold_xdp::{Attached, Interface, VlanTags};
use std::ops::Range;

/// Returns what is known before the first packet.
pub(crate) fn at_start(
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
