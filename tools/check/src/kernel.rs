//! VFIO and iommufd as the kernel answers them: descriptors, and the calls on them.

pub(crate) mod abi;
mod device;
pub(crate) mod iommufd;
pub(crate) mod type1;

use crate::findings::{self, Findings, counted};
use crate::function::Function;
use crate::memory_calls::Going;
use crate::process::{Inode, Memory, Site};
use crate::space::{Space, Span};
use abi::Struct;
use iommufd::Iommufd;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::OFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::cell::OnceCell;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use type1::Type1;

/// A node of `/dev` that the program opens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Node {
    /// `/dev/vfio/vfio`.
    Container,
    /// `/dev/vfio/N`, by the group's number.
    Group(u32),
    /// `/dev/vfio/devices/vfioN`, by the device's index.
    Device(usize),
    /// `/dev/iommu`.
    Iommufd,
}

/// What all calls use.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) findings: Arc<Findings>,
    pub(crate) functions: Vec<Arc<Function>>,
    /// The width of the IOMMU.
    pub(crate) iova_bits: u32,
}

impl Shared {
    pub(crate) fn not_covered(&self, what: &str) {
        self.findings.add(&findings::NOT_COVERED, format!("not covered: {what}"), Vec::new);
    }
}

/// The caller of a system call, which waits for its answer.
#[derive(Debug)]
pub(crate) struct Caller {
    pub(crate) tid: u32,
    pub(crate) argument: u64,
    pub(crate) memory: Arc<Memory>,
    pc: u64,
    site: OnceCell<Site>,
}

impl Caller {
    pub(crate) fn new(tid: u32, pc: u64, argument: u64, memory: Arc<Memory>) -> Self {
        Self { tid, argument, memory, pc, site: OnceCell::new() }
    }

    /// Returns where it is in its code.
    pub(crate) fn site(&self) -> Site {
        self.site.get_or_init(|| Site::of(self.tid, self.pc, &self.memory)).clone()
    }
}

/// The answer to a system call.
#[derive(Debug)]
pub(crate) enum Reply {
    /// It returns this value. A map whose caller does not receive it is undone.
    Value(i64, Option<(Arc<Space>, Span)>),
    /// It fails with this error number.
    Error(i32),
    /// It returns this descriptor.
    Descriptor(OwnedFd, bool),
    /// It is none of ours.
    Resume,
}

impl From<abi::Answer> for Reply {
    fn from(answer: abi::Answer) -> Self {
        match answer {
            Ok(value) => Self::Value(value, None),
            Err(errno) => Self::Error(errno),
        }
    }
}

type Id = u64;

#[derive(Debug, Default)]
struct Container {
    groups: Vec<u32>,
    iommu: Option<Type1>,
}

#[derive(Debug)]
enum Object {
    Container(Container),
    Group { number: u32, container: Option<Id> },
    Iommufd(Iommufd),
}

/// An object, and our end of the socket that the program has the other end of: it hangs up with the
/// program's last descriptor.
#[derive(Debug)]
struct Opened {
    object: Object,
    end: OwnedFd,
    inode: Inode,
    closed: bool,
}

/// How the program has a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Access {
    /// Not at all.
    Closed,
    /// Through its group, which is this object.
    Group(Id),
    /// By its own node; bound to this iommufd, with its identifier there.
    Node(Option<(Id, u32)>),
}

/// The kernel's side of all descriptors.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) shared: Shared,
    opened: BTreeMap<Id, Opened>,
    last: Id,
    access: Vec<Access>,
    devices: HashMap<Inode, usize>,
}

impl Kernel {
    pub(crate) fn new(shared: Shared) -> io::Result<Self> {
        let mut devices = HashMap::new();
        for (index, function) in shared.functions.iter().enumerate() {
            devices.insert(function.inode()?, index);
        }
        let access = vec![Access::Closed; shared.functions.len()];
        Ok(Self { shared, opened: BTreeMap::new(), last: 0, access, devices })
    }

    /// Returns our ends of the descriptors, to wait for their last close.
    pub(crate) fn ends(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.opened.values().filter(|opened| !opened.closed).map(|opened| opened.end.as_fd())
    }

    /// Returns whether a device is open, whose last close is seen by looking.
    pub(crate) fn has_open_device(&self) -> bool {
        self.access.iter().any(|access| *access != Access::Closed)
    }

    /// Returns whether a file is that of a device's descriptors.
    pub(crate) fn is_device(&self, inode: Inode) -> bool {
        self.devices.contains_key(&inode)
    }

    fn find(&self, inode: Inode) -> Option<Id> {
        self.opened.iter().find(|(_, opened)| opened.inode == inode).map(|(id, _)| *id)
    }

    /// Opens a node, with the caller's flags.
    pub(crate) fn open(&mut self, node: Node, flags: i32) -> Reply {
        self.reap();
        match self.try_open(node, flags) {
            Ok(fd) => Reply::Descriptor(fd, flags & libc::O_CLOEXEC != 0),
            Err(error) => Reply::Error(error.raw_os_error().unwrap_or(libc::EIO)),
        }
    }

    fn try_open(&mut self, node: Node, flags: i32) -> io::Result<OwnedFd> {
        let object = match node {
            Node::Device(index) => {
                let function = self.shared.functions.get(index);
                let function = function.ok_or(io::Error::from_raw_os_error(libc::ENODEV))?;
                let access = self.access.get_mut(index);
                match access {
                    Some(Access::Group(_)) | None => {
                        return Err(io::Error::from_raw_os_error(libc::EBUSY));
                    }
                    Some(access @ Access::Closed) => *access = Access::Node(None),
                    Some(Access::Node(_)) => {}
                }
                return function.open(OFlags::from_bits_retain(flags.cast_unsigned()));
            }
            Node::Group(number) => {
                let is_it = |object: &Object| matches!(object, Object::Group { number: own, .. } if *own == number);
                let bound = self
                    .shared
                    .functions
                    .iter()
                    .zip(&self.access)
                    .any(|(f, access)| f.group == number && matches!(access, Access::Node(_)));
                if bound || self.opened.values().any(|opened| is_it(&opened.object)) {
                    return Err(io::Error::from_raw_os_error(libc::EBUSY));
                }
                Object::Group { number, container: None }
            }
            Node::Container => Object::Container(Container::default()),
            Node::Iommufd => Object::Iommufd(Iommufd::default()),
        };
        let family = AddressFamily::UNIX;
        let (ours, theirs) =
            rustix::net::socketpair(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        if flags & libc::O_NONBLOCK != 0 {
            rustix::fs::fcntl_setfl(&theirs, OFlags::NONBLOCK)?;
        }
        let found = rustix::fs::fstat(&theirs)?;
        self.last += 1;
        let inode = (found.st_dev, found.st_ino);
        self.opened.insert(self.last, Opened { object, end: ours, inode, closed: false });
        Ok(theirs)
    }

    /// Ends the devices that the program has closed. Its last close makes no event: a call that
    /// would find fault with a device in use looks first.
    fn reap_devices(&mut self) {
        for (index, access) in self.access.iter_mut().enumerate() {
            let Some(function) = self.shared.functions.get(index) else { continue };
            if *access == Access::Closed || function.is_open() {
                continue;
            }
            function.close();
            if let Access::Node(Some((id, _))) = access
                && let Some(Object::Iommufd(iommufd)) =
                    self.opened.get_mut(id).map(|opened| &mut opened.object)
            {
                iommufd.unbind(index);
            }
            *access = Access::Closed;
        }
    }

    /// Ends what the program has closed.
    pub(crate) fn reap(&mut self) {
        self.reap_devices();
        for opened in self.opened.values_mut() {
            let mut polled = [PollFd::new(&opened.end, PollFlags::empty())];
            let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            let _ = rustix::event::poll(&mut polled, Some(&now));
            let [end] = polled;
            opened.closed |= end.revents().contains(PollFlags::HUP);
        }
        // Groups first: a container lives as long as a group is in it.
        let used = |id: Id| {
            self.access.iter().any(|access| match access {
                Access::Group(own) => *own == id,
                Access::Node(Some((own, _))) => *own == id,
                Access::Closed | Access::Node(None) => false,
            })
        };
        let ended: Vec<Id> = self
            .opened
            .iter()
            .filter(|(id, opened)| {
                opened.closed && !used(**id) && matches!(opened.object, Object::Group { .. })
            })
            .map(|(id, _)| *id)
            .collect();
        for id in ended {
            self.unset_container(id);
            self.opened.remove(&id);
        }
        let used = |id: Id| {
            self.access
                .iter()
                .any(|access| matches!(access, Access::Node(Some((own, _))) if *own == id))
        };
        let mut left = Vec::new();
        self.opened.retain(|id, opened| {
            let ended = opened.closed
                && match &opened.object {
                    Object::Container(container) => container.groups.is_empty(),
                    Object::Iommufd(_) => !used(*id),
                    Object::Group { .. } => false,
                };
            if ended {
                match &opened.object {
                    Object::Container(Container { iommu: Some(iommu), .. }) => {
                        left.push(iommu.space.count());
                    }
                    Object::Iommufd(iommufd) => {
                        left.extend(iommufd.spaces().map(|space| space.count()));
                    }
                    _ => {}
                }
            }
            !ended
        });
        for count in left.into_iter().filter(|count| *count > 0) {
            let mappings = counted(count, "mapping");
            let text = format!("an address space was closed with {mappings} in it");
            self.shared.findings.add(&findings::MAPS_LEFT, text, Vec::new);
        }
    }

    /// Removes a group from its container.
    fn unset_container(&mut self, group: Id) {
        let Some(Object::Group { number, container }) =
            self.opened.get_mut(&group).map(|opened| &mut opened.object)
        else {
            return;
        };
        let (number, Some(id)) = (*number, container.take()) else { return };
        if let Some(Object::Container(container)) =
            self.opened.get_mut(&id).map(|opened| &mut opened.object)
        {
            container.groups.retain(|own| *own != number);
            // With the last group the IOMMU goes, and all of its mappings.
            if container.groups.is_empty()
                && let Some(iommu) = container.iommu.take()
                && iommu.space.count() > 0
            {
                let text = format!(
                    "the last group left a container with {} in it",
                    counted(iommu.space.count(), "mapping")
                );
                self.shared.findings.add(&findings::MAPS_LEFT, text, Vec::new);
            }
        }
    }

    /// Answers an `ioctl` on a descriptor.
    pub(crate) fn ioctl(&mut self, inode: Inode, request: u32, caller: &Caller) -> Reply {
        if let Some(index) = self.devices.get(&inode).copied() {
            return self.device_call(index, request, caller);
        }
        let Some(id) = self.find(inode) else { return Reply::Resume };
        // A device that the program closed before this call uses nothing any more.
        if matches!(request, abi::IOMMU_UNMAP_DMA | abi::IOAS_UNMAP) {
            self.reap_devices();
        }
        match self.opened.get_mut(&id).map(|opened| &mut opened.object) {
            Some(Object::Container(_)) => self.container_call(id, request, caller),
            Some(Object::Group { .. }) => self.group_call(id, request, caller),
            Some(Object::Iommufd(iommufd)) => match iommufd.call(&self.shared, caller, request) {
                Some(reply) => reply,
                None => {
                    self.shared.not_covered(&format!("request {request:#x} of an iommufd"));
                    Reply::Error(libc::ENOTTY)
                }
            },
            None => Reply::Resume,
        }
    }

    fn container_call(&mut self, id: Id, request: u32, caller: &Caller) -> Reply {
        let Some(Object::Container(container)) =
            self.opened.get_mut(&id).map(|opened| &mut opened.object)
        else {
            return Reply::Resume;
        };
        let argument = caller.argument;
        match request {
            abi::GET_API_VERSION => Reply::Value(0, None),
            abi::CHECK_EXTENSION => {
                let has = match argument {
                    type1::TYPE1 | type1::TYPE1_V2 | type1::NESTING | type1::UNMAP_ALL => true,
                    type1::DMA_CC_IOMMU | type1::UPDATE_VADDR => container.iommu.is_some(),
                    _ => false,
                };
                Reply::Value(has.into(), None)
            }
            abi::SET_IOMMU => {
                if container.groups.is_empty() || container.iommu.is_some() {
                    return Reply::Error(libc::EINVAL);
                }
                let version_2 = match argument {
                    type1::TYPE1 => false,
                    type1::TYPE1_V2 => true,
                    // The IOMMU has none, which the kernel finds out now.
                    type1::NESTING => return Reply::Error(libc::EINVAL),
                    _ => return Reply::Error(libc::ENODEV),
                };
                container.iommu = Some(Type1 { version_2, space: Arc::default() });
                Reply::Value(0, None)
            }
            _ => {
                // Without an IOMMU the container knows no other request.
                let Some(iommu) = container.iommu.clone() else {
                    return Reply::Error(libc::EINVAL);
                };
                match request {
                    abi::IOMMU_GET_INFO => iommu.info(&self.shared, caller).into(),
                    abi::IOMMU_MAP_DMA => match iommu.map(&self.shared, caller) {
                        Ok(span) => Reply::Value(0, Some((iommu.space, span))),
                        Err(errno) => Reply::Error(errno),
                    },
                    abi::IOMMU_UNMAP_DMA => iommu.unmap(&self.shared, caller).into(),
                    _ => {
                        self.shared.not_covered(&format!("request {request:#x} of a container"));
                        Reply::Error(libc::ENOTTY)
                    }
                }
            }
        }
    }

    fn group_call(&mut self, id: Id, request: u32, caller: &Caller) -> Reply {
        let Some(Object::Group { number, container }) =
            self.opened.get(&id).map(|opened| &opened.object)
        else {
            return Reply::Resume;
        };
        let (number, container) = (*number, *container);
        match request {
            abi::GROUP_GET_STATUS => group_status(container.is_some(), caller).into(),
            abi::GROUP_SET_CONTAINER => self.set_container(id, number, container, caller).into(),
            abi::GROUP_UNSET_CONTAINER => {
                self.reap();
                if container.is_none() {
                    return Reply::Error(libc::EINVAL);
                }
                if self.access.contains(&Access::Group(id)) {
                    return Reply::Error(libc::EBUSY);
                }
                self.unset_container(id);
                Reply::Value(0, None)
            }
            abi::GROUP_GET_DEVICE_FD => self.device_fd(id, number, container, caller),
            _ => {
                self.shared.not_covered(&format!("request {request:#x} of a group"));
                Reply::Error(libc::ENOTTY)
            }
        }
    }

    fn set_container(
        &mut self,
        id: Id,
        number: u32,
        before: Option<Id>,
        caller: &Caller,
    ) -> abi::Answer {
        let fd = Struct::read(&caller.memory, caller.argument, 4)?.u32(0).cast_signed();
        if before.is_some() {
            return Err(libc::EINVAL);
        }
        let inode = crate::process::inode_of(caller.tid, fd).ok_or(libc::EBADF)?;
        let to = self.find(inode).ok_or(libc::EBADFD)?;
        match self.opened.get_mut(&to).map(|opened| &mut opened.object) {
            Some(Object::Container(container)) => container.groups.push(number),
            Some(Object::Iommufd(_)) => {
                self.shared.not_covered("VFIO_GROUP_SET_CONTAINER with an iommufd");
                return Err(libc::EINVAL);
            }
            _ => return Err(libc::EBADFD),
        }
        if let Some(Object::Group { container, .. }) =
            self.opened.get_mut(&id).map(|opened| &mut opened.object)
        {
            *container = Some(to);
        }
        Ok(0)
    }

    fn device_fd(&mut self, id: Id, number: u32, container: Option<Id>, caller: &Caller) -> Reply {
        self.reap();
        let name = match caller.memory.string(caller.argument, 4096) {
            Ok(name) => name,
            Err(errno) => return Reply::Error(errno),
        };
        let name = String::from_utf8_lossy(&name).into_owned();
        let iommu = container.and_then(|id| match &self.opened.get(&id)?.object {
            Object::Container(container) => container.iommu.clone(),
            _ => None,
        });
        let is_it = |f: &Arc<Function>| f.group == number && f.bdf.to_string() == name;
        let Some(index) = self.shared.functions.iter().position(is_it) else {
            return Reply::Error(libc::ENODEV);
        };
        let Some(iommu) = iommu else { return Reply::Error(libc::EINVAL) };
        let (Some(function), Some(access)) =
            (self.shared.functions.get(index), self.access.get_mut(index))
        else {
            return Reply::Error(libc::ENODEV);
        };
        match function.open(OFlags::RDWR) {
            Ok(fd) => {
                *access = Access::Group(id);
                function.attach(Some(iommu.space));
                Reply::Descriptor(fd, true)
            }
            Err(error) => Reply::Error(error.raw_os_error().unwrap_or(libc::EIO)),
        }
    }

    fn device_call(&mut self, index: usize, request: u32, caller: &Caller) -> Reply {
        match request {
            abi::DEVICE_BIND_IOMMUFD => return self.bind(index, caller).into(),
            abi::DEVICE_ATTACH | abi::DEVICE_DETACH => {
                return self.attach(index, request, caller).into();
            }
            _ if !self.is_usable(index) => return Reply::Error(libc::EINVAL),
            _ => {}
        }
        let Some(function) = self.shared.functions.get(index) else {
            return Reply::Error(libc::ENODEV);
        };
        match device::call(function, caller, request) {
            Some(answer) => answer.into(),
            None => {
                self.shared.not_covered(&format!("request {request:#x} of a device"));
                Reply::Error(libc::ENOTTY)
            }
        }
    }

    /// Returns whether a device may be used: opened through its group, or bound.
    fn is_usable(&self, index: usize) -> bool {
        matches!(self.access.get(index), Some(Access::Group(_) | Access::Node(Some(_))))
    }

    fn bind(&mut self, index: usize, caller: &Caller) -> abi::Answer {
        let mut bind = Struct::sized(&caller.memory, caller.argument, 16)?;
        let (flags, fd) = (bind.u32(4), bind.u32(8).cast_signed());
        match self.access.get(index) {
            Some(Access::Node(None)) => {}
            Some(Access::Node(Some(_))) => return Err(libc::EINVAL),
            // Of a device that was opened through its group the request is not known.
            _ => return Err(libc::ENOTTY),
        }
        if flags != 0 || fd < 0 {
            return Err(libc::EINVAL);
        }
        let inode = crate::process::inode_of(caller.tid, fd).ok_or(libc::EBADF)?;
        let id = self.find(inode).ok_or(libc::EBADFD)?;
        let Some(Object::Iommufd(iommufd)) =
            self.opened.get_mut(&id).map(|opened| &mut opened.object)
        else {
            return Err(libc::EBADFD);
        };
        let number = iommufd.bind(index);
        if let Some(access) = self.access.get_mut(index) {
            *access = Access::Node(Some((id, number)));
        }
        bind.set_u32(12, number);
        bind.write(&caller.memory, caller.argument)
    }

    fn attach(&mut self, index: usize, request: u32, caller: &Caller) -> abi::Answer {
        let is_attach = request == abi::DEVICE_ATTACH;
        let id = match self.access.get(index) {
            Some(Access::Node(Some((id, _)))) => *id,
            Some(Access::Node(None)) => return Err(libc::EINVAL),
            _ => return Err(libc::ENOTTY),
        };
        let len = if is_attach { 12 } else { 8 };
        let attach = Struct::sized(&caller.memory, caller.argument, len)?;
        if attach.u32(4) != 0 {
            return Err(libc::EINVAL);
        }
        let ioas = is_attach.then(|| attach.u32(8));
        let Some(Object::Iommufd(iommufd)) =
            self.opened.get_mut(&id).map(|opened| &mut opened.object)
        else {
            return Err(libc::EINVAL);
        };
        let space = iommufd.attach(&self.shared, caller, index, ioas)?;
        if let Some(function) = self.shared.functions.get(index) {
            function.attach(space);
        }
        Ok(0)
    }

    /// Answers `pread` or `pwrite` on a descriptor.
    pub(crate) fn access(
        &mut self,
        inode: Inode,
        place: [u64; 3],
        write: bool,
        caller: &Caller,
    ) -> Reply {
        let Some(index) = self.devices.get(&inode).copied() else { return Reply::Resume };
        if !self.is_usable(index) {
            return Reply::Error(libc::EINVAL);
        }
        match self.shared.functions.get(index) {
            Some(function) => device::access(function, caller, place, write).into(),
            None => Reply::Error(libc::ENODEV),
        }
    }

    /// Reports the mappings of memory that a call takes away, before it does.
    pub(crate) fn memory_goes(&self, going: &Going, caller: &Caller) {
        let mut spaces: Vec<Arc<Space>> = Vec::new();
        for opened in self.opened.values() {
            match &opened.object {
                Object::Container(Container { iommu: Some(iommu), .. }) => {
                    spaces.push(iommu.space.clone());
                }
                Object::Iommufd(iommufd) => spaces.extend(iommufd.spaces().cloned()),
                Object::Container(_) | Object::Group { .. } => {}
            }
        }
        for memory in &going.memory {
            let of_space = |space: &Arc<Space>| space.of_memory(&caller.memory, *memory);
            for entry in spaces.iter().flat_map(of_space) {
                let (call, span) = (going.call, entry.span);
                let text = format!("{call} of {memory}, to which {span} is mapped");
                self.shared.findings.add(&findings::MEMORY_GONE, text, || {
                    vec![
                        format!("{call} by {}", caller.site().describe()),
                        format!("{span} was mapped by {}", entry.site.describe()),
                    ]
                });
            }
        }
    }

    /// Ends everything: no process has a descriptor any more.
    pub(crate) fn finish(&mut self) {
        self.reap();
        for function in &self.shared.functions {
            function.attach(None);
        }
    }
}

fn group_status(in_container: bool, caller: &Caller) -> abi::Answer {
    let mut status = Struct::sized(&caller.memory, caller.argument, 8)?;
    // Viable; and in a container.
    status.set_u32(4, 1 | if in_container { 2 } else { 0 });
    status.write(&caller.memory, caller.argument)
}
