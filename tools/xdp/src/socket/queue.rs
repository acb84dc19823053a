//! [`Socket`]: the rings of one queue and the pool that feeds them.

use super::{ChunkSize, LINK_HEADER, Options, mtu_limit};
use crate::error::{self, OpenError, SocketError, TransmitError, TransmitRefused};
use crate::packet::Packet;
use crate::redirect::Redirect;
use crate::rings::{Chunk, DRAIN, Rings};
use crate::stats::{SocketReport, Traffic};
use crate::system::{Interface, LinkType, RingSizes, Umem};
use pinfold::page_pool::{
    AllocError, Config, Destroyed, Fragment, Holder, Page, PagePool, Tag, TooManyTags,
};
use pinfold::{Arena, ArenaMemory};
use std::time::Duration;

/// The fill ring is refilled when this many of its places are empty.
const BATCH: u32 = 64;
/// The holder of the pages that are in the fill ring, or were received and not passed on.
const HOLDER: &str = "socket";

/// A socket on one queue of an interface, with its own memory. It belongs to one thread at a time;
/// the packets that it received may go to others.
#[derive(Debug)]
pub struct Socket {
    /// Dropped first: then the kernel has no more chunks.
    rings: Rings,
    next: Next,
    pool: PagePool,
    /// Holds the program that passes packets here.
    redirect: Option<Redirect>,
    interface: Interface,
    queue: u32,
    chunk: ChunkSize,
    sizes: RingSizes,
    holder: Tag,
    traffic: Traffic,
    /// The time for which a wait polls the driver before it sleeps.
    busy_poll: Option<Duration>,
    /// Set once the interface has been removed: the kernel says so only once.
    gone: bool,
}

/// The chunks that enter the fill ring next, between two refills none: allocated together, and
/// entered together.
#[derive(Debug)]
enum Next {
    Pages(Box<[Option<Page>; BATCH as usize]>),
    Parts(Box<[Option<Fragment>; BATCH as usize]>),
}

impl Next {
    fn of(chunk: ChunkSize) -> Self {
        match chunk {
            ChunkSize::Page => Self::Pages(Box::new([const { None }; BATCH as usize])),
            ChunkSize::HalfPage => Self::Parts(Box::new([const { None }; BATCH as usize])),
        }
    }
}

impl Options {
    /// Opens a socket on the queue and fills its fill ring. It receives when a program passes it
    /// packets ([`Socket::redirect`]).
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(self, interface: &Interface) -> Result<Socket, OpenError> {
        self.check(interface)?;
        self.open_in(interface, Arena::builder().size(self.memory).build_unmapped()?)
    }

    /// Opens a socket that receives into `memory`, which may be mapped into domains and shared with
    /// other sockets; its size replaces [`memory`](Self::memory).
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open_in(self, interface: &Interface, memory: ArenaMemory) -> Result<Socket, OpenError> {
        let Self { queue, chunk, rings, .. } = self;
        self.memory(memory.len() as u64).check(interface)?;
        let umem = Umem::new(memory);
        let bytes = umem.memory().len() as u64;
        // Twice what the rings hold: pages that the program returned and the consumer has not
        // collected.
        let returned = (rings.fill * 2).min(1 << 20);
        let name = format!("{}-{queue}", interface.name());
        let pool =
            PagePool::new(umem.clone(), &name, Config { ring: returned, ..Config::default() })?;
        let holder = pool.tag(HOLDER).unwrap_or(Tag::NONE);
        let opened = Rings::open(umem, chunk.shift(), rings, self.need_wakeup);
        let opened = opened.map_err(|error| error::of_memory(interface, bytes, error))?;
        if let Some(busy) = self.busy_poll {
            let set = opened.socket().prefer_busy_poll(busy.time, busy.budget);
            set.map_err(|error| error::of_memory(interface, bytes, error))?;
        }
        let bind =
            || opened.socket().bind(interface, queue, self.copying.zero_copy(), self.need_wakeup);
        error::while_busy(interface, bind)
            .map_err(|error| error::of_bind(interface, queue, error))?;
        let mut socket = Socket {
            rings: opened,
            next: Next::of(chunk),
            pool,
            redirect: None,
            interface: interface.clone(),
            queue,
            chunk,
            sizes: rings,
            holder,
            traffic: Traffic::default(),
            busy_poll: self.busy_poll.map(|busy| busy.time),
            gone: false,
        };
        socket.refill(1);
        Ok(socket)
    }

    /// Checks what the kernel would refuse without a reason, or accept and drop every packet.
    fn check(&self, interface: &Interface) -> Result<(), OpenError> {
        let Self { queue, chunk, memory, rings, .. } = *self;
        let name = || interface.name().to_owned();
        if let LinkType::Other(_) = interface.link_type() {
            return Err(OpenError::LinkType { interface: name(), link: interface.link_type() });
        }
        if interface.queues().is_some_and(|queues| queue >= queues) {
            return Err(OpenError::NoQueue {
                interface: name(),
                queue,
                queues: interface.queues(),
            });
        }
        if !interface.is_up() {
            return Err(OpenError::Down { interface: name() });
        }
        let (mtu, limit) = (interface.mtu(), mtu_limit(chunk.bytes()));
        if mtu > limit {
            let is_loopback = interface.link_type() == LinkType::Loopback;
            return Err(OpenError::Mtu {
                interface: name(),
                mtu,
                limit,
                chunk: chunk.bytes(),
                is_loopback,
            });
        }
        let RingSizes { fill, completion, receive, transmit } = rings;
        let chunks = memory >> chunk.shift();
        let valid = |size: u32| size.is_power_of_two() && (64..=Self::MAX_RING).contains(&size);
        if ![fill, completion, receive, transmit].into_iter().all(valid) || u64::from(fill) > chunks
        {
            let limit = Self::MAX_RING;
            return Err(OpenError::Sizes { fill, completion, receive, transmit, chunks, limit });
        }
        Ok(())
    }
}

impl Socket {
    /// Returns the default options.
    pub fn options() -> Options {
        Options::default()
    }

    /// Makes the program pass the packets of the queue here from now on, as long as the socket
    /// lives.
    ///
    /// # Errors
    /// [`OpenError`], for instance if the program is on another interface.
    pub fn redirect(&mut self, redirect: &Redirect) -> Result<(), OpenError> {
        redirect.enter(self.queue, self.rings.socket())?;
        self.redirect = Some(redirect.clone());
        Ok(())
    }

    /// Returns the interface, as it was when the socket was opened.
    pub fn interface(&self) -> &Interface {
        &self.interface
    }

    /// Returns the number of the queue.
    pub fn queue(&self) -> u32 {
        self.queue
    }

    /// Returns how many entries the rings have.
    pub fn ring_sizes(&self) -> RingSizes {
        self.sizes
    }

    /// Returns whether the driver writes to the socket's pages itself.
    pub fn is_zero_copy(&self) -> bool {
        self.rings.socket().is_zero_copy()
    }

    /// Appends up to `most` packets that have been received, and refills the fill ring; returns how
    /// many. Makes no system call unless the driver asks for one. O(packets).
    #[inline]
    pub fn receive(&mut self, packets: &mut Vec<Packet>, most: usize) -> usize {
        let (count, bytes) = self.rings.receive(packets, most);
        self.traffic.received += u64::from(count);
        self.traffic.received_bytes += bytes;
        // At most half of the ring: while all of it is empty, packets are dropped.
        self.refill(BATCH.min(self.sizes.fill / 2));
        count as usize
    }

    /// Refills the fill ring if at least `least` of its places are empty.
    #[inline]
    fn refill(&mut self, least: u32) {
        let wanted = self.sizes.fill.saturating_sub(self.rings.filled());
        if wanted < least {
            return;
        }
        let mut wanted = self.rings.fill_room(wanted).min(wanted);
        let mut filled = 0;
        while wanted > 0 {
            let count = self.refill_some(wanted.min(BATCH));
            filled += count;
            wanted = if count < BATCH { 0 } else { wanted - count };
        }
        if filled > 0 {
            self.rings.wake_receive();
        }
    }

    /// Refills at most [`BATCH`] places of the fill ring, which are empty; returns how many.
    #[inline]
    fn refill_some(&mut self, wanted: u32) -> u32 {
        let (pool, wanted) = (&mut self.pool, wanted as usize);
        match &mut self.next {
            Next::Pages(pages) => {
                let pages = pages.get_mut(..wanted).unwrap_or_default();
                pool.fill_for(pages, self.holder);
                self.rings.fill(pages)
            }
            Next::Parts(parts) => {
                let parts = parts.get_mut(..wanted).unwrap_or_default();
                // Not after the first that there is not: each attempt asks the source.
                for part in parts.iter_mut().filter(|part| part.is_none()) {
                    let Ok(fragment) = pool.alloc_fragment(self.chunk.bytes() as usize) else {
                        break;
                    };
                    *part = Some(fragment);
                }
                self.rings.fill(parts)
            }
        }
    }

    /// Waits until a packet has been received; returns false if none was within `limit`.
    ///
    /// # Errors
    /// [`SocketError::Gone`] if the interface has been removed.
    pub fn wait(&mut self, limit: Duration) -> Result<bool, SocketError> {
        // Pages that came back since the last packet: without them the kernel might never receive
        // another one.
        self.refill(1);
        self.collect();
        if self.gone {
            return Err(SocketError::Gone {
                interface: self.interface.name().to_owned(),
                queue: self.queue,
            });
        }
        if let Some(time) = self.busy_poll
            && self.rings.poll_driver(time.min(limit))
        {
            return Ok(true);
        }
        let waited = self.rings.socket().wait(false, limit);
        waited.map_err(|error| {
            let error = SocketError::new(&self.interface, self.queue, error);
            self.gone = matches!(error, SocketError::Gone { .. });
            error
        })
    }

    /// Returns a packet's page to the pool. One of another socket is dropped, which returns it to
    /// its own.
    #[inline]
    pub fn recycle(&mut self, packet: Packet) {
        packet.into_chunk().recycle(&mut self.pool);
    }

    /// Returns the pages of all packets to the pool, as [`recycle`](Self::recycle) does, and
    /// empties the list. O(packets).
    #[inline]
    pub fn recycle_all(&mut self, packets: &mut Vec<Packet>) {
        for packet in packets.drain(..) {
            self.recycle(packet);
        }
    }

    /// Creates a packet of these bytes, to be sent.
    ///
    /// # Errors
    /// [`AllocError`] if no page is free, or the bytes do not fit into a chunk.
    pub fn packet(&mut self, bytes: &[u8]) -> Result<Packet, AllocError> {
        let limit = self.chunk.bytes() as usize;
        if bytes.len() > limit {
            return Err(AllocError::Length { len: bytes.len(), limit });
        }
        let chunk = allocate(&mut self.pool, self.chunk, self.holder)?;
        // It fits, as was just checked.
        let _ = chunk.memory().copy_from_slice(0, bytes);
        let mut packet = Packet::empty(chunk);
        packet.place(0, u32::try_from(bytes.len()).unwrap_or(u32::MAX), self.chunk.bytes());
        Ok(packet)
    }

    /// Queues a packet for sending by the next [`flush`](Self::flush). Its page returns to the pool
    /// when it has been sent.
    ///
    /// # Errors
    /// [`TransmitError`] with the packet: the interface has no transmit queue of the socket's
    /// number, or the packet lies in another socket's memory, has a length that the interface does
    /// not send, or the ring is full.
    pub fn transmit(&mut self, packet: Packet) -> Result<(), TransmitError> {
        let refuse = |packet, why| Err(TransmitError { packet, why });
        // A header of Ethernet, with a tag or without; or one of IPv4.
        let (least, header) = match self.interface.link_type() {
            LinkType::Ethernet | LinkType::Loopback => (14, LINK_HEADER),
            LinkType::RawIp | LinkType::Other(_) => (20, 0),
        };
        if !self.interface.can_transmit(self.queue) {
            let queues = self.interface.transmit_queues().unwrap_or(0);
            return refuse(packet, TransmitRefused::NoQueue { queue: self.queue, queues });
        }
        let limit = (self.interface.mtu() + header) as usize;
        if packet.len() < least || packet.len() > limit {
            return refuse(packet, TransmitRefused::Length { least, limit });
        }
        if self.rings.transmit_room(1) == 0 {
            self.collect();
            if self.rings.transmit_room(1) == 0 {
                return refuse(packet, TransmitRefused::Full);
            }
        }
        self.rings.transmit(packet).or_else(|packet| refuse(packet, TransmitRefused::Foreign))
    }

    /// Makes the kernel send the queued packets, and returns the pages of those that have been sent
    /// to the pool.
    ///
    /// # Errors
    /// [`SocketError`] if the interface is down; what is queued stays queued.
    pub fn flush(&mut self) -> Result<(), SocketError> {
        let flushed = self.rings.flush();
        self.collect();
        flushed.map_err(|error| SocketError::new(&self.interface, self.queue, error))
    }

    /// Returns the pages of what has been sent to the pool; returns how many packets are still
    /// being sent.
    pub fn collect(&mut self) -> u32 {
        let pool = &mut self.pool;
        self.traffic.sent +=
            u64::from(self.rings.complete(|packet| packet.into_chunk().recycle(pool)));
        self.rings.sending()
    }

    /// Waits until all that is queued has been sent, for a fifth of a second at most, and returns
    /// its pages to the pool; returns how many packets have not been sent. Packets that the kernel
    /// has not taken by the time the socket is closed are never sent.
    pub fn drain(&mut self) -> u32 {
        let (pool, sent) = (&mut self.pool, &mut self.traffic.sent);
        self.rings.drain(DRAIN, |packet| {
            *sent += 1;
            packet.into_chunk().recycle(pool);
        })
    }

    /// Returns the tag for a holder's name, for [`Packet::hold_for`].
    ///
    /// # Errors
    /// [`TooManyTags`].
    pub fn holder(&self, name: &str) -> Result<Tag, TooManyTags> {
        self.pool.tag(name)
    }

    /// Returns the packets received and sent so far. O(1).
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Returns all counters, and who holds pages. One system call, and O(pages).
    ///
    /// # Errors
    /// [`SocketError`].
    pub fn stats(&self) -> Result<SocketReport, SocketError> {
        let kernel = self.rings.socket().stats();
        Ok(SocketReport {
            traffic: self.traffic,
            kernel: kernel.map_err(|error| SocketError::new(&self.interface, self.queue, error))?,
            unknown_entries: self.rings.unknown(),
            in_kernel: u64::from(self.rings.filled()) + u64::from(self.rings.sending()),
            pool: self.pool.stats(),
            counts: self.pool.counts(),
            holders: self.pool.holders(),
        })
    }

    /// Closes the socket: the kernel gives up its chunks, and what packets still hold can be
    /// observed.
    pub fn close(self) -> Closed {
        let Self { rings, next, pool, redirect, .. } = self;
        drop(rings);
        drop(next);
        drop(redirect);
        Closed(pool.close())
    }
}

#[inline]
fn allocate(pool: &mut PagePool, chunk: ChunkSize, holder: Tag) -> Result<Chunk, AllocError> {
    Ok(match chunk {
        ChunkSize::Page => Chunk::Page(pool.alloc_for(holder)?),
        ChunkSize::HalfPage => Chunk::Part(pool.alloc_fragment(chunk.bytes() as usize)?),
    })
}

/// A closed socket, to observe who still holds packets. Dropping it does not affect them.
#[derive(Debug)]
pub struct Closed(Destroyed);

impl Closed {
    /// Returns who holds pages now: fewer as packets are dropped. O(pages).
    pub fn holders(&self) -> Vec<Holder> {
        self.0.holders()
    }
}
