//! The interfaces that packets to far addresses leave by: without their packets the machine may be
//! unreachable.

use super::links::{Link, RouteError, links, over};
use super::netlink::{Attributes, Netlink, NetlinkError, push_attribute, u16_at, u32_at};
use std::collections::{BTreeSet, HashMap};
use std::net::{Ipv4Addr, Ipv6Addr};

const GET_ADDRESS: u16 = 22;
const NEW_ADDRESS: u16 = 20;
const GET_ROUTE: u16 = 26;
const NEW_ROUTE: u16 = 24;
const GET_RULE: u16 = 34;
const NEW_RULE: u16 = 32;
const GET_NEXT_HOP: u16 = 106;
const NEW_NEXT_HOP: u16 = 104;

/// Attributes of a route: to, from, the interface, several hops, a mark, an object.
const TO: u16 = 1;
const FROM: u16 = 2;
const INTERFACE: u16 = 4;
const SEVERAL: u16 = 9;
const MARK: u16 = 16;
const OBJECT: u16 = 30;

/// Public addresses of every part of the space, so that a default route that is cut into several
/// has one of them in each part; of no well-known service, which may have a route of its own.
const FAR_V4: [Ipv4Addr; 8] = [
    Ipv4Addr::new(23, 45, 67, 89),
    Ipv4Addr::new(45, 67, 89, 101),
    Ipv4Addr::new(78, 90, 123, 134),
    Ipv4Addr::new(101, 112, 123, 134),
    Ipv4Addr::new(145, 156, 167, 178),
    Ipv4Addr::new(178, 189, 190, 201),
    Ipv4Addr::new(195, 206, 117, 128),
    Ipv4Addr::new(212, 223, 134, 145),
];
const FAR_V6: [Ipv6Addr; 6] = [
    Ipv6Addr::new(0x2001, 0x4567, 0x89ab, 0, 0, 0, 0, 1),
    Ipv6Addr::new(0x2400, 0x1234, 0x5678, 0, 0, 0, 0, 1),
    Ipv6Addr::new(0x2600, 0x1234, 0x5678, 0, 0, 0, 0, 1),
    Ipv6Addr::new(0x2801, 0x2345, 0x6789, 0, 0, 0, 0, 1),
    Ipv6Addr::new(0x2a01, 0x2345, 0x6789, 0, 0, 0, 0, 1),
    Ipv6Addr::new(0x2c0f, 0x2345, 0x6789, 0, 0, 0, 0, 1),
];

/// Returns the name of an interface that packets to far addresses leave by and that depends on
/// interface `index`.
pub(super) fn default_route_over(index: u32) -> Result<Option<String>, RouteError> {
    let mut netlink = Netlink::open()?;
    let links = links(&mut netlink)?;
    let mut hops = Vec::new();
    for selector in &selectors(&mut netlink, &links)? {
        let far_v4 = FAR_V4.iter().map(|far| far.octets().to_vec());
        for far in far_v4.chain(FAR_V6.iter().map(|far| far.octets().to_vec())) {
            if let Some(question) = question(&far, selector.as_ref()) {
                hops.extend(route_to(&mut netlink, &question)?);
            }
        }
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
    let name = |index| links.iter().find(|link| link.index == index).map(|link| link.name.clone());
    let over = over(&links, &first, index)?;
    Ok(over.map(|index| name(index).unwrap_or_else(|| format!("interface {index}"))))
}

/// An attribute of a packet that decides about its route, beside its destination.
type Selector = (u16, Vec<u8>);

/// Returns what a rule or a route may tell packets of this machine apart by: nothing, each of its
/// addresses as the source, each VRF, each mark of a rule.
fn selectors(
    netlink: &mut Netlink,
    links: &[Link],
) -> Result<BTreeSet<Option<Selector>>, NetlinkError> {
    let mut selectors = BTreeSet::from([None]);
    let vrf = links.iter().filter(|link| link.kind == "vrf");
    selectors.extend(vrf.map(|vrf| Some((INTERFACE, vrf.index.to_ne_bytes().to_vec()))));
    selectors.extend(netlink.dump(GET_ADDRESS, &[0; 8], |kind, body| match kind {
        NEW_ADDRESS => source(body).ok_or(NetlinkError::Malformed).map(Some),
        _ => Ok(None),
    })?);
    for family in [libc::AF_INET, libc::AF_INET6] {
        let mut request = [0; 12];
        let [first, ..] = &mut request;
        *first = u8::try_from(family).unwrap_or_default();
        let marks = netlink.dump(GET_RULE, &request, |kind, body| match kind {
            NEW_RULE => mark(body).ok_or(NetlinkError::Malformed).map(Some),
            _ => Ok(None),
        });
        match marks {
            Ok(marks) => selectors.extend(marks),
            // A kernel without rules, or without the protocol.
            Err(NetlinkError::Refused(errno))
                if [libc::EAFNOSUPPORT, libc::EOPNOTSUPP].contains(&errno.raw()) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(selectors)
}

/// Reads an address of this machine, as a source of packets; nothing if packets to far addresses
/// cannot have it. `None` if it cannot be read.
fn source(body: &[u8]) -> Option<Option<Selector>> {
    // `struct ifaddrmsg`, and attributes.
    const SCOPE: usize = 3;
    const LINK: u8 = 253;
    const ADDRESS: u16 = 1;
    const LOCAL: u16 = 2;
    let (header, attributes) = body.split_at_checked(8)?;
    let (mut address, mut local) = (None, None);
    for attribute in Attributes(attributes) {
        match attribute.ok()? {
            (ADDRESS, value) => address = Some(value),
            (LOCAL, value) => local = Some(value),
            _ => {}
        }
    }
    let is_far = *header.get(SCOPE)? < LINK;
    let own = local.or(address).filter(|_| is_far);
    Some(own.map(|own| (FROM, own.to_vec())))
}

/// Reads a rule: the mark of the packets that it is for, if it has one. `None` if it cannot be
/// read.
fn mark(body: &[u8]) -> Option<Option<Selector>> {
    // `struct fib_rule_hdr`, and attributes.
    const RULE_MARK: u16 = 10;
    let mut found = None;
    for attribute in Attributes(body.get(12..)?) {
        if let (RULE_MARK, value) = attribute.ok()? {
            found = Some(u32_at(value, 0)?).filter(|mark| *mark != 0);
        }
    }
    Some(found.map(|mark| (MARK, mark.to_ne_bytes().to_vec())))
}

/// Returns the question for the route of packets to the address `to`; nothing for a source of
/// another protocol.
fn question(to: &[u8], selector: Option<&Selector>) -> Option<Vec<u8>> {
    /// The entry of the table with all of its hops, not the one that a packet would take (Linux
    /// 4.13).
    const WHOLE: u32 = 0x2000;
    let (family, bits) = if to.len() == 4 { (libc::AF_INET, 32) } else { (libc::AF_INET6, 128) };
    let from_bits = match selector {
        Some((FROM, from)) if from.len() != to.len() => return None,
        Some((FROM, _)) => bits,
        _ => 0,
    };
    // `struct rtmsg`.
    let mut body = vec![u8::try_from(family).ok()?, bits, from_bits, 0, 0, 0, 0, 0];
    body.extend(WHOLE.to_ne_bytes());
    push_attribute(&mut body, TO, to);
    if let Some((name, value)) = selector {
        push_attribute(&mut body, *name, value);
    }
    Some(body)
}

/// Asks the kernel for a route; nothing if there is none.
fn route_to(netlink: &mut Netlink, question: &[u8]) -> Result<Vec<Hop>, NetlinkError> {
    match netlink.ask(GET_ROUTE, question, |kind, body| match kind {
        NEW_ROUTE => route(body),
        _ => None,
    }) {
        // In this order: there is none, packets are dropped (a blackhole, or an address that has
        // been removed meanwhile), the VRF has been removed, a kernel without the protocol.
        Err(NetlinkError::Refused(errno))
            if matches!(
                errno.raw(),
                libc::ENETUNREACH
                    | libc::EHOSTUNREACH
                    | libc::ESRCH
                    | libc::EACCES
                    | libc::EINVAL
                    | libc::ENODEV
                    | libc::EAFNOSUPPORT
                    | libc::EOPNOTSUPP
            ) =>
        {
            Ok(Vec::new())
        }
        found => found,
    }
}

/// The target of a route.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Hop {
    /// An interface, by its index.
    Interface(u32),
    /// An object of its own (`ip nexthop`), by its number.
    Object(u32),
}

/// Reads a route: where it leads. `None` if it cannot be read.
fn route(body: &[u8]) -> Option<Vec<Hop>> {
    // `struct rtmsg`, and attributes.
    const TYPE: usize = 7;
    const UNICAST: u8 = 1;
    let (header, attributes) = body.split_at_checked(12)?;
    let leads = *header.get(TYPE)? == UNICAST;
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
    match (leads, hops.is_empty()) {
        (false, _) => Some(Vec::new()),
        // A route that leads nowhere is not understood.
        (true, true) => None,
        (true, false) => Some(hops),
    }
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
    // An entry of a VXLAN's table: no route uses it.
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

#[cfg(test)]
mod tests {
    use super::super::netlink::push_attribute;
    use super::*;
    use proptest::prelude::*;

    fn route_of(kind: u8, attributes: &[(u16, &[u8])]) -> Vec<u8> {
        let mut body = vec![2, 0, 0, 0, 100, 0, 0, kind, 0, 0, 0, 0];
        attributes.iter().for_each(|(kind, value)| push_attribute(&mut body, *kind, value));
        body
    }

    fn hop(index: u32) -> Vec<u8> {
        let mut hop = [&16u16.to_ne_bytes()[..], &[0, 0], &index.to_ne_bytes()].concat();
        push_attribute(&mut hop, 5, &[10, 0, 0, 1]);
        hop
    }

    #[test]
    fn a_route_leads_to_all_of_its_hops() {
        let several = [hop(4), hop(9)].concat();
        let interface = 7u32.to_ne_bytes();
        let of = |kind, attributes: &[(u16, &[u8])]| route(&route_of(kind, attributes));
        assert_eq!(of(1, &[(4, &interface)]), Some(vec![Hop::Interface(7)]));
        assert_eq!(of(1, &[(9, &several)]), Some(vec![Hop::Interface(4), Hop::Interface(9)]));
        assert_eq!(of(1, &[(30, &interface)]), Some(vec![Hop::Object(7)]));
        assert_eq!(of(1, &[]), None, "it leads nowhere");
        assert_eq!(of(7, &[(4, &interface)]), Some(vec![]), "unreachable");
    }

    #[test]
    fn a_truncated_answer_is_not_taken_for_no_route() {
        let several = [hop(4), hop(9)].concat();
        let whole = route_of(1, &[(1, &[0; 4]), (9, &several)]);
        // Behind a whole attribute a cut cannot be seen in the body alone, but the message's length
        // says it.
        for cut in 0..whole.len() {
            assert_eq!(route(&whole[..cut]), None, "{cut} bytes");
        }
    }

    #[test]
    fn packets_are_told_apart_by_source_vrf_and_mark() {
        let address = |scope, attributes: &[(u16, &[u8])]| {
            let mut body = vec![2, 24, 0, scope, 1, 0, 0, 0];
            attributes.iter().for_each(|(kind, value)| push_attribute(&mut body, *kind, value));
            source(&body)
        };
        let own = Some((FROM, vec![10, 0, 0, 1]));
        assert_eq!(address(0, &[(1, &[10, 0, 0, 1])]), Some(own.clone()));
        let both: [(u16, &[u8]); 2] = [(1, &[10, 0, 0, 2]), (2, &[10, 0, 0, 1])];
        assert_eq!(address(0, &both), Some(own.clone()), "not the peer's");
        assert_eq!(address(253, &both), Some(None), "of the link");
        assert_eq!(address(254, &both), Some(None), "of this machine");
        assert_eq!(source(&[0; 7]), None);
        let mut rule = vec![0; 12];
        assert_eq!(mark(&rule), Some(None));
        push_attribute(&mut rule, 10, &5u32.to_ne_bytes());
        assert_eq!(mark(&rule), Some(Some((MARK, 5u32.to_ne_bytes().to_vec()))));
        assert_eq!(mark(&rule[..11]), None);
        let far = [8; 4];
        let with = question(&far, own.as_ref()).unwrap();
        assert_eq!(with[..4], [2, 32, 32, 0]);
        assert_eq!(with.len(), 12 + 8 + 8);
        assert_eq!(question(&[8; 16], own.as_ref()), None, "of another protocol");
        assert_eq!(question(&far, None).unwrap()[..4], [2, 32, 0, 0]);
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

    #[test]
    fn the_machine_of_the_test_can_be_asked() {
        let loopback = super::super::netdev::facts("lo").unwrap();
        // Its default route may lead to a tunnel.
        let found = default_route_over(loopback.index);
        assert!(matches!(found, Ok(_) | Err(RouteError::Beneath { .. })), "{found:?}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(body in proptest::collection::vec(any::<u8>(), 0..120)) {
            let _ = (route(&body), next_hop(&body), source(&body), mark(&body));
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
            let _ = (route(&body), next_hop(&body), source(&body), mark(&body));
        }
    }
}
