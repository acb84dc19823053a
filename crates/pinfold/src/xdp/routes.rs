//! The interfaces that the default route depends on: without their packets the machine may be
//! unreachable.

use crate::sys::netlink::{Attributes, Netlink, NetlinkError, u16_at, u32_at};
use std::collections::HashMap;

const GET_LINK: u16 = 18;
const NEW_LINK: u16 = 16;
const GET_ROUTE: u16 = 26;
const NEW_ROUTE: u16 = 24;
const GET_NEXT_HOP: u16 = 106;
const NEW_NEXT_HOP: u16 = 104;

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

/// Returns the name of the interface of a default route that depends on interface `index`.
pub(super) fn default_route_over(index: u32) -> Result<Option<String>, RouteError> {
    let mut netlink = Netlink::open()?;
    let routes = [libc::AF_INET, libc::AF_INET6].map(|family| default_routes(&mut netlink, family));
    let [of_v4, of_v6] = routes;
    let mut hops = of_v4?;
    hops.extend(of_v6?);
    if hops.is_empty() {
        return Ok(None);
    }
    let objects = if hops.iter().any(|hop| matches!(hop, Hop::Object(_))) {
        netlink.dump(GET_NEXT_HOP, &[0; 8], |kind, body| match kind {
            NEW_NEXT_HOP => next_hop(body).ok_or(NetlinkError::Malformed).map(Some),
            _ => Ok(None),
        })?
    } else {
        Vec::new()
    };
    let first = resolve(&hops, &objects.into_iter().collect())?;
    let links = links(&mut netlink)?;
    let name = |index| links.iter().find(|link| link.index == index).map(|link| link.name.clone());
    let over = over(&links, &first, index)?;
    Ok(over.map(|index| name(index).unwrap_or_else(|| format!("interface {index}"))))
}

/// Returns the one of the interfaces `first` that depends on `index`.
fn over(links: &[Link], first: &[u32], index: u32) -> Result<Option<u32>, RouteError> {
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

fn default_routes(netlink: &mut Netlink, family: i32) -> Result<Vec<Hop>, NetlinkError> {
    let mut request = [0; 12];
    let [first, ..] = &mut request;
    *first = u8::try_from(family).unwrap_or_default();
    let found = netlink.dump(GET_ROUTE, &request, |kind, body| match kind {
        NEW_ROUTE => route(body, family).ok_or(NetlinkError::Malformed).map(Some),
        _ => Ok(None),
    });
    match found {
        // A kernel without the protocol has no route of it.
        Err(NetlinkError::Refused(errno))
            if family == libc::AF_INET6
                && [libc::EAFNOSUPPORT, libc::EOPNOTSUPP].contains(&errno.raw()) =>
        {
            Ok(Vec::new())
        }
        found => Ok(found?.into_iter().flatten().collect()),
    }
}

/// Where a route leads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Hop {
    /// An interface, by its index.
    Interface(u32),
    /// An object of its own (`ip nexthop`), by its number.
    Object(u32),
}

/// Reads a route: where it leads if it is a default route; nothing if it is another one. `None` if
/// it cannot be read.
fn route(body: &[u8], family: i32) -> Option<Vec<Hop>> {
    // `struct rtmsg`, and attributes.
    const DESTINATION_BITS: usize = 1;
    const TYPE: usize = 7;
    const UNICAST: u8 = 1;
    const INTERFACE: u16 = 4;
    const SEVERAL: u16 = 9;
    const OBJECT: u16 = 30;
    let (header, attributes) = body.split_at_checked(12)?;
    let widest = if family == libc::AF_INET { 1 } else { 3 };
    let is_default = i32::from(*header.first()?) == family
        && *header.get(DESTINATION_BITS)? <= widest
        && *header.get(TYPE)? == UNICAST;
    let mut hops = Vec::new();
    for attribute in Attributes(attributes) {
        match attribute.ok()? {
            (INTERFACE, value) => hops.push(Hop::Interface(u32_at(value, 0)?)),
            (OBJECT, value) => hops.push(Hop::Object(u32_at(value, 0)?)),
            (SEVERAL, mut list) => {
                // `struct rtnexthop`, with attributes of its own.
                while !list.is_empty() {
                    let len = usize::from(u16_at(list, 0)?);
                    hops.push(Hop::Interface(u32_at(list.get(..len)?, 4)?));
                    list = list.get(len.next_multiple_of(4)..).unwrap_or_default();
                }
            }
            _ => {}
        }
    }
    if !is_default {
        return Some(Vec::new());
    }
    // A default route that leads nowhere is not understood.
    (!hops.is_empty()).then_some(hops)
}

/// The destination of an object of `ip nexthop`.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Object {
    Interface(u32),
    /// Other objects.
    Group(Vec<u32>),
    /// Packets are dropped.
    Nowhere,
}

/// Reads a next hop. `None` if it cannot be read.
fn next_hop(body: &[u8]) -> Option<(u32, Object)> {
    // `struct nhmsg`, and attributes.
    const NUMBER: u16 = 1;
    const GROUP: u16 = 2;
    const BLACK_HOLE: u16 = 4;
    const INTERFACE: u16 = 5;
    // Of a VXLAN's table: no route uses it.
    const FORWARDING: u16 = 11;
    let (mut number, mut object) = (None, None);
    for attribute in Attributes(body.get(8..)?) {
        match attribute.ok()? {
            (NUMBER, value) => number = Some(u32_at(value, 0)?),
            (INTERFACE, value) => object = Some(Object::Interface(u32_at(value, 0)?)),
            (GROUP, value) => {
                let members = value.chunks(8).map(|member| u32_at(member, 0));
                object = Some(Object::Group(members.collect::<Option<_>>()?));
            }
            (BLACK_HOLE | FORWARDING, _) => object = Some(Object::Nowhere),
            _ => {}
        }
    }
    Some((number?, object?))
}

/// Returns the interfaces that routes lead to.
fn resolve(hops: &[Hop], objects: &HashMap<u32, Object>) -> Result<Vec<u32>, NetlinkError> {
    let mut interfaces = Vec::new();
    for hop in hops {
        let number = match *hop {
            Hop::Interface(index) => {
                interfaces.push(index);
                continue;
            }
            Hop::Object(number) => number,
        };
        let object = |number: &u32| objects.get(number).ok_or(NetlinkError::Malformed);
        let members = match object(&number)? {
            // A group has no groups.
            Object::Group(members) => members.iter().map(object).collect::<Result<_, _>>()?,
            single => vec![single],
        };
        for member in members {
            match member {
                Object::Interface(index) => interfaces.push(*index),
                Object::Nowhere => {}
                Object::Group(_) => return Err(NetlinkError::Malformed),
            }
        }
    }
    Ok(interfaces)
}

/// Returns all interfaces of the namespace.
fn links(netlink: &mut Netlink) -> Result<Vec<Link>, NetlinkError> {
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
struct Link {
    index: u32,
    name: String,
    /// The bridge, bond or VRF that it is a port of.
    master: Option<u32>,
    /// The one below it, or the other end of a pair, in the same namespace.
    lower: Option<u32>,
    /// Whether the interface below it, or its other end, is in another namespace.
    is_elsewhere: bool,
    /// The kind of the interface; empty for a card.
    kind: String,
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
    use super::*;
    use crate::sys::netlink::push_attribute;
    use proptest::prelude::*;

    const V4: i32 = libc::AF_INET;
    const V6: i32 = libc::AF_INET6;

    fn route_of(family: i32, bits: u8, kind: u8, attributes: &[(u16, &[u8])]) -> Vec<u8> {
        let mut body = vec![u8::try_from(family).unwrap(), bits, 0, 0, 100, 0, 0, kind, 0, 0, 0, 0];
        attributes.iter().for_each(|(kind, value)| push_attribute(&mut body, *kind, value));
        body
    }

    fn hop(index: u32) -> Vec<u8> {
        let mut hop = [&16u16.to_ne_bytes()[..], &[0, 0], &index.to_ne_bytes()].concat();
        push_attribute(&mut hop, 5, &[10, 0, 0, 1]);
        hop
    }

    #[test]
    fn a_default_route_leads_to_all_of_its_hops() {
        let several = [hop(4), hop(9)].concat();
        let interface = 7u32.to_ne_bytes();
        let of = |bits, kind, attributes: &[(u16, &[u8])]| {
            route(&route_of(V4, bits, kind, attributes), V4)
        };
        assert_eq!(of(0, 1, &[(4, &interface)]), Some(vec![Hop::Interface(7)]));
        assert_eq!(of(1, 1, &[(4, &interface)]), Some(vec![Hop::Interface(7)]), "half of all");
        assert_eq!(of(0, 1, &[(9, &several)]), Some(vec![Hop::Interface(4), Hop::Interface(9)]));
        assert_eq!(of(0, 1, &[(30, &interface)]), Some(vec![Hop::Object(7)]));
        assert_eq!(of(0, 1, &[]), None, "it leads nowhere");
        assert_eq!(of(0, 7, &[(4, &interface)]), Some(vec![]), "unreachable");
        assert_eq!(of(8, 1, &[(4, &interface)]), Some(vec![]));
        assert_eq!(
            route(&route_of(V6, 3, 1, &[(4, &interface)]), V6),
            Some(vec![Hop::Interface(7)])
        );
        assert_eq!(
            route(&route_of(V6, 3, 1, &[(4, &interface)]), V4),
            Some(vec![]),
            "another protocol"
        );
    }

    #[test]
    fn a_truncated_answer_is_not_taken_for_no_route() {
        let several = [hop(4), hop(9)].concat();
        let whole = route_of(V4, 0, 1, &[(1, &[0; 4]), (9, &several)]);
        // Behind a whole attribute a cut cannot be seen in the body alone, but the message's length
        // says it.
        for cut in (0..whole.len()).filter(|cut| *cut != 12 && *cut != 20) {
            assert_eq!(route(&whole[..cut], V4), None, "{cut} bytes");
        }
        for cut in [12, 20] {
            assert_eq!(route(&whole[..cut], V4), None, "a default route without a hop");
        }
    }

    #[test]
    fn objects_are_followed_to_their_interfaces() {
        let mut group = vec![0; 8];
        push_attribute(&mut group, 1, &5u32.to_ne_bytes());
        push_attribute(
            &mut group,
            2,
            &[2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0].map(u8::to_le),
        );
        if cfg!(target_endian = "little") {
            assert_eq!(next_hop(&group), Some((5, Object::Group(vec![2, 3]))));
        }
        let objects = [
            (2, Object::Interface(20)),
            (3, Object::Interface(30)),
            (4, Object::Nowhere),
            (5, Object::Group(vec![2, 3])),
            (6, Object::Group(vec![2, 9])),
        ];
        let objects = objects.into_iter().collect();
        let of = |number| resolve(&[Hop::Interface(1), Hop::Object(number)], &objects);
        assert_eq!((of(2), of(5), of(4)), (Ok(vec![1, 20]), Ok(vec![1, 20, 30]), Ok(vec![1])));
        assert_eq!(
            (of(6), of(9)),
            (Err(NetlinkError::Malformed), Err(NetlinkError::Malformed)),
            "unknown"
        );
    }

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

    #[test]
    fn the_machine_of_the_test_can_be_asked() {
        let loopback = crate::sys::netdev::facts("lo").unwrap();
        // Its default route may lead to a tunnel.
        let found = default_route_over(loopback.index);
        assert!(matches!(found, Ok(_) | Err(RouteError::Beneath { .. })), "{found:?}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(body in proptest::collection::vec(any::<u8>(), 0..120), family in 0..12) {
            let _ = (route(&body, family), next_hop(&body), link(&body));
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
            let _ = (route(&body, V4), next_hop(&body), link(&body));
        }
    }
}
