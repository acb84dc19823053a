//! The interfaces of the namespace, and those that the packets of one go through.

use super::netlink::{Attributes, Netlink, NetlinkError, u32_at};

const GET_LINK: u16 = 18;
const NEW_LINK: u16 = 16;

/// Why it is not known whether the default route depends on an interface.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RouteError {
    /// The kernel could not be asked.
    #[error("{0}")]
    Netlink(#[from] NetlinkError),
    /// The route leads to a tunnel, for instance, of which the kernel does not say what its packets
    /// leave by.
    #[error(
        "it leads to {interface}, of the kind {kind}, and what that sends may leave by any interface"
    )]
    Beneath {
        /// The name of the tunnel.
        interface: String,
        /// The kind of the interface, as `ip -details link` shows it.
        kind: String,
    },
}

/// Returns the one of the interfaces `first` that depends on `index`.
pub(super) fn over(links: &[Link], first: &[u32], index: u32) -> Result<Option<u32>, RouteError> {
    let mut unknown = None;
    for first in first {
        let found = depends(links, *first);
        if found.contains(&index) {
            return Ok(Some(*first));
        }
        let mut through = links.iter().filter(|link| found.contains(&link.index));
        unknown = unknown.or_else(|| through.find(|link| !is_followed(links, link)));
    }
    match unknown {
        None => Ok(None),
        Some(link) => {
            Err(RouteError::Beneath { interface: link.name.clone(), kind: link.kind.clone() })
        }
    }
}

/// Returns whether it is known what the packets of an interface leave by. A kind that this program
/// does not know counts as a tunnel.
fn is_followed(links: &[Link], link: &Link) -> bool {
    // By its driver, its ports or its other end, or not at all.
    let is_end = matches!(
        &*link.kind,
        "" | "bond"
            | "bridge"
            | "can"
            | "dummy"
            | "ifb"
            | "ipoib"
            | "netdevsim"
            | "netkit"
            | "team"
            | "vcan"
            | "veth"
            | "vrf"
            | "wwan"
    );
    // The interface of an IPsec interface has another purpose: `lo`, for instance.
    let is_bound = link.lower.is_some() && link.kind != "xfrm";
    let has_ports = || links.iter().any(|port| port.master == Some(link.index));
    // The port of a bridge is that of a virtual machine; a tunnel's program has routes to it.
    let is_machine = link.kind == "tun" && link.master.is_some();
    is_end || is_bound || link.is_elsewhere || is_machine || has_ports()
}

/// Returns all interfaces of the namespace.
pub(super) fn links(netlink: &mut Netlink) -> Result<Vec<Link>, NetlinkError> {
    netlink.dump(GET_LINK, &[0; 16], |kind, body| match kind {
        NEW_LINK => link(body).ok_or(NetlinkError::Malformed).map(Some),
        _ => Ok(None),
    })
}

/// The interfaces that packets pass before they reach this one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Through {
    /// The other end of a pair; `None` if that is in another namespace.
    Pair(Option<String>),
    /// Other interfaces of this machine: ports, or the one below.
    Others,
    /// Its driver alone.
    Driver,
}

/// Asks the kernel what the packets of interface `index` come through.
pub(super) fn through(index: u32) -> Result<Through, NetlinkError> {
    let links = links(&mut Netlink::open()?)?;
    Ok(through_of(&links, index))
}

fn through_of(links: &[Link], index: u32) -> Through {
    let by_index = |index: u32| links.iter().find(|link| link.index == index);
    match by_index(index) {
        Some(link) if link.is_pair => {
            Through::Pair(link.lower.and_then(by_index).map(|other| other.name.clone()))
        }
        Some(link) if link.is_above => Through::Others,
        _ if links.iter().any(|link| link.master == Some(index)) => Through::Others,
        _ => Through::Driver,
    }
}

/// An interface, and those that it is connected with.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Link {
    pub(super) index: u32,
    pub(super) name: String,
    /// The bridge, bond or VRF that it is a port of.
    master: Option<u32>,
    /// The one below it, or the other end of a pair, in the same namespace.
    lower: Option<u32>,
    /// Whether the interface below it, or its other end, is in another namespace.
    is_elsewhere: bool,
    /// The kind of the interface; empty for a card.
    pub(super) kind: String,
    is_pair: bool,
    /// It gets packets that the one below it has received.
    is_above: bool,
}

/// Reads an interface. `None` if it cannot be read.
fn link(body: &[u8]) -> Option<Link> {
    // `struct ifinfomsg`, and attributes.
    const NAME: u16 = 3;
    const LOWER: u16 = 5;
    const MASTER: u16 = 10;
    const INFO: u16 = 18;
    const INFO_KIND: u16 = 1;
    const INFO_DATA: u16 = 2;
    const LOWER_NAMESPACE: u16 = 37;
    /// Of a VXLAN, whose `LOWER` is absent.
    const VXLAN_LOWER: u16 = 3;
    let (header, attributes) = body.split_at_checked(16)?;
    let index = u32_at(header, 4)?;
    let (mut name, mut master, mut lower, mut is_elsewhere) = (String::new(), None, None, false);
    let (mut kind, mut data) = (String::new(), &[][..]);
    let text = |value: &[u8]| {
        String::from_utf8_lossy(value.strip_suffix(&[0]).unwrap_or(value)).into_owned()
    };
    let other =
        |value: &[u8]| Some(Some(u32_at(value, 0)?).filter(|lower| ![0, index].contains(lower)));
    for attribute in Attributes(attributes) {
        match attribute.ok()? {
            (NAME, value) => name = text(value),
            (LOWER, value) => lower = other(value)?,
            (MASTER, value) => master = Some(u32_at(value, 0)?).filter(|master| *master != 0),
            (LOWER_NAMESPACE, _) => is_elsewhere = true,
            (INFO, value) => {
                for inner in Attributes(value) {
                    match inner.ok()? {
                        (INFO_KIND, value) => kind = text(value),
                        (INFO_DATA, value) => data = value,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    if kind == "vxlan" {
        for attribute in Attributes(data) {
            if let (VXLAN_LOWER, value) = attribute.ok()? {
                lower = other(value)?;
            }
        }
    }
    let is_pair = ["veth", "netkit", "vxcan"].contains(&&*kind);
    let is_above = ["macvlan", "macvtap", "ipvlan", "ipvtap"].contains(&&*kind);
    let lower = lower.filter(|_| !is_elsewhere);
    Some(Link { index, name, master, lower, is_elsewhere, kind, is_pair, is_above })
}

/// Returns the interfaces that packets of interface `first` go through, itself included.
fn depends(links: &[Link], first: u32) -> Vec<u32> {
    let mut found = vec![first];
    let mut next = 0;
    while let Some(&index) = found.get(next) {
        next += 1;
        let ports = |master: u32| links.iter().filter(move |link| link.master == Some(master));
        let mut more: Vec<u32> = ports(index).map(|port| port.index).collect();
        if let Some(link) = links.iter().find(|link| link.index == index) {
            more.extend(link.lower);
            // Packets that leave the other end of a pair go on through the bridge that it is a port
            // of.
            let other = link.lower.filter(|_| link.is_pair);
            let other = other.and_then(|other| links.iter().find(|link| link.index == other));
            more.extend(other.and_then(|other| other.master));
        }
        more.into_iter().for_each(|index| {
            if !found.contains(&index) {
                found.push(index);
            }
        });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::netlink::push_attribute;
    use super::*;
    use proptest::prelude::*;

    fn interface(index: u32, master: u32, lower: u32, is_pair: bool) -> Link {
        let some = |number: u32| Some(number).filter(|number| *number != 0);
        Link {
            index,
            name: index.to_string(),
            master: some(master),
            lower: some(lower),
            is_elsewhere: false,
            kind: String::new(),
            is_pair,
            is_above: false,
        }
    }

    /// Returns a message about interface 9, named t0, with attributes, and those of its kind.
    fn link_of(kind: &str, attributes: &[(u16, u32)], data: &[(u16, u32)]) -> Option<Link> {
        let mut body = [[0; 4], 9u32.to_ne_bytes(), [0; 4], [0; 4]].concat();
        push_attribute(&mut body, 3, b"t0\0");
        attributes
            .iter()
            .for_each(|(name, value)| push_attribute(&mut body, *name, &value.to_ne_bytes()));
        let (mut info, mut of_kind) = (Vec::new(), Vec::new());
        data.iter()
            .for_each(|(name, value)| push_attribute(&mut of_kind, *name, &value.to_ne_bytes()));
        push_attribute(&mut info, 1, format!("{kind}\0").as_bytes());
        push_attribute(&mut info, 2, &of_kind);
        push_attribute(&mut body, 18, &info);
        link(&body)
    }

    #[test]
    fn a_route_to_a_tunnel_on_an_unknown_interface_is_not_known() {
        const LOWER: u16 = 5;
        const MASTER: u16 = 10;
        const NAMESPACE: u16 = 37;
        let of = |kind: &str, attributes: &[(u16, u32)], data: &[(u16, u32)]| {
            let links = [interface(2, 0, 0, false), link_of(kind, attributes, data).unwrap()];
            assert_eq!(over(&links, &[9], 9), Ok(Some(9)), "{kind}: the route's own");
            over(&links, &[9], 2)
        };
        let refused =
            |kind: &str| Err(RouteError::Beneath { interface: "t0".into(), kind: kind.into() });
        // The lower interface is an attribute of the VXLAN alone; those of other kinds mean
        // something else.
        assert_eq!(of("vxlan", &[], &[(1, 5), (3, 2)]), Ok(Some(9)));
        assert_eq!(of("vxlan", &[], &[(1, 5), (3, 4)]), Ok(None), "on another interface");
        assert_eq!(of("vxlan", &[], &[(1, 2)]), refused("vxlan"));
        assert_eq!(of("geneve", &[], &[(3, 2)]), refused("geneve"));
        let kinds = [
            "gre",
            "gretap",
            "ipip",
            "sit",
            "ip6tnl",
            "vti",
            "wireguard",
            "xfrm",
            "ppp",
            "tun",
            "openvswitch",
            "new",
        ];
        for kind in kinds {
            assert_eq!(of(kind, &[], &[]), refused(kind));
            assert_eq!(of(kind, &[(LOWER, 0)], &[]), refused(kind), "it is bound to none");
            assert_eq!(of(kind, &[(LOWER, 9)], &[]), refused(kind), "to itself");
            assert_eq!(of(kind, &[(LOWER, 2)], &[]), Ok(Some(9)), "{kind}");
            assert_eq!(
                of(kind, &[(LOWER, 2), (NAMESPACE, 1)], &[]),
                Ok(None),
                "{kind}: that of another namespace"
            );
        }
        assert_eq!(of("xfrm", &[(LOWER, 2)], &[]), Ok(Some(9)));
        assert_eq!(
            of("xfrm", &[(LOWER, 4)], &[]),
            refused("xfrm"),
            "its packets may leave by another"
        );
        for kind in ["", "dummy", "bridge", "veth", "vrf"] {
            assert_eq!(of(kind, &[], &[]), Ok(None), "{kind}");
        }
        assert_eq!(of("tun", &[(MASTER, 5)], &[]), Ok(None), "of a virtual machine");
        assert_eq!(link_of("vxlan", &[], &[(3, 2)]).map(|link| link.lower), Some(Some(2)));
        // A second route that certainly depends on it is the answer.
        let tunnel = link_of("wireguard", &[], &[]).unwrap();
        assert_eq!(over(&[interface(2, 0, 0, false), tunnel], &[9, 2], 2), Ok(Some(2)));
        // A tunnel below what the route leads to.
        let links = [interface(1, 0, 9, false), link_of("gre", &[], &[]).unwrap()];
        assert_eq!(over(&links, &[1], 2), refused("gre"));
    }

    #[test]
    fn packets_come_through_pairs_ports_and_what_is_below() {
        let above = Link { is_above: true, ..interface(4, 0, 3, false) };
        let pair = [interface(5, 0, 6, true), interface(6, 7, 5, true), interface(8, 0, 0, true)];
        let links =
            [&pair[..], &[interface(7, 0, 0, false), above, interface(9, 0, 3, false)]].concat();
        let pair = |name: Option<&str>| Through::Pair(name.map(str::to_owned));
        for (index, through) in [
            (5, pair(Some("6"))),
            (6, pair(Some("5"))),
            (8, pair(None)),
            (7, Through::Others),
            (4, Through::Others),
            (9, Through::Driver),
            (77, Through::Driver),
        ] {
            assert_eq!(through_of(&links, index), through, "{index}");
        }
    }

    #[test]
    fn interfaces_are_followed_down_and_across_a_pair() {
        // 1, 2: ports of the bond 3. 4: a VLAN of the bond. 5 and 6: a pair, of which 6 is a port
        // of the bridge 7, as 8 is.
        let links = [
            interface(1, 3, 0, false),
            interface(2, 3, 0, false),
            interface(3, 0, 0, false),
            interface(4, 0, 3, false),
            interface(5, 0, 6, true),
            interface(6, 7, 5, true),
            interface(7, 0, 0, false),
            interface(8, 7, 0, false),
            interface(9, 0, 1, false),
        ];
        let of = |first| {
            let mut found = depends(&links, first);
            found.sort_unstable();
            found
        };
        assert_eq!(of(1), [1]);
        assert_eq!(of(4), [1, 2, 3, 4]);
        assert_eq!(of(9), [1, 9], "not the other ports: a VLAN gets its packets before the bond");
        assert_eq!(of(5), [5, 6, 7, 8]);
        assert_eq!(of(7), [5, 6, 7, 8]);
        assert_eq!(of(77), [77], "unknown");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(body in proptest::collection::vec(any::<u8>(), 0..120)) {
            let _ = link(&body);
        }

        /// Bytes that get further: a header, and attributes that are known, of any contents.
        #[test]
        fn any_attributes_are_read_or_refused(
            attributes in proptest::collection::vec((0u16..40, proptest::collection::vec(any::<u8>(), 0..20)), 0..6),
            cut in 0usize..40,
        ) {
            let mut body = vec![0; 16];
            attributes.iter().for_each(|(kind, value)| push_attribute(&mut body, *kind, value));
            body.truncate(body.len() - cut.min(body.len()));
            let _ = link(&body);
        }
    }
}
