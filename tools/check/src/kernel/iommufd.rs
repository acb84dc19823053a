//! iommufd: address spaces, and the devices that are bound (`linux/iommufd.h`).

use super::abi::{Answer, Struct};
use super::type1::{self, is_translated, ranges};
use super::{Caller, Reply, Shared};
use crate::findings;
use crate::space::{Entry, PAGE, Space, Span};
use std::collections::BTreeMap;
use std::sync::Arc;

const FIXED: u32 = 1;
const WRITEABLE: u32 = 2;
const READABLE: u32 = 4;
/// What an identifier of an iommufd stands for.
#[derive(Clone, Debug)]
pub(crate) enum Object {
    /// An address space.
    Ioas(Arc<Space>),
    /// A device, by its index; and the address space that it is attached to.
    Device(usize, Option<u32>),
}

/// The objects of one iommufd.
#[derive(Clone, Debug, Default)]
pub(crate) struct Iommufd {
    objects: BTreeMap<u32, Object>,
    last: u32,
}

impl Iommufd {
    fn add(&mut self, object: Object) -> u32 {
        // The kernel's identifiers begin at 1, and are given out in order.
        self.last += 1;
        self.objects.insert(self.last, object);
        self.last
    }

    fn ioas(&self, id: u32) -> Result<Arc<Space>, i32> {
        match self.objects.get(&id) {
            Some(Object::Ioas(space)) => Ok(space.clone()),
            _ => Err(libc::ENOENT),
        }
    }

    fn has_device(&self, ioas: u32) -> bool {
        let attached =
            |object: &Object| matches!(object, Object::Device(_, Some(to)) if *to == ioas);
        self.objects.values().any(attached)
    }

    /// Binds a device, and returns its identifier.
    pub(crate) fn bind(&mut self, index: usize) -> u32 {
        self.add(Object::Device(index, None))
    }

    /// Removes a device.
    pub(crate) fn unbind(&mut self, index: usize) {
        let is_it = |object: &Object| matches!(object, Object::Device(own, _) if *own == index);
        self.objects.retain(|_, object| !is_it(object));
    }

    /// Attaches a bound device to an address space, or detaches it.
    pub(crate) fn attach(
        &mut self,
        shared: &Shared,
        caller: &Caller,
        index: usize,
        ioas: Option<u32>,
    ) -> Result<Option<Arc<Space>>, i32> {
        let space = ioas.map(|id| self.ioas(id)).transpose()?;
        if let Some(space) = &space {
            // What is mapped where the device cannot reach it stands in the way.
            let [first, second] = ranges(shared.iova_bits);
            let gap = Span { first: first.last + 1, last: second.first - 1 };
            if space.overlapping(gap).is_some() {
                return Err(libc::EADDRINUSE);
            }
            // Pages are locked as long as a device reaches them.
            type1::may_lock(caller, space, 0)?;
        }
        for object in self.objects.values_mut() {
            if let Object::Device(own, attached) = object
                && *own == index
            {
                *attached = ioas;
            }
        }
        Ok(space)
    }

    /// Returns the address spaces, for what is left in them.
    pub(crate) fn spaces(&self) -> impl Iterator<Item = &Arc<Space>> {
        self.objects.values().filter_map(|object| match object {
            Object::Ioas(space) => Some(space),
            Object::Device(..) => None,
        })
    }

    /// Answers a request; `None` for one that is not covered.
    pub(crate) fn call(&mut self, shared: &Shared, caller: &Caller, request: u32) -> Option<Reply> {
        use super::abi;
        Some(match request {
            abi::IOMMU_DESTROY => self.destroy(caller).into(),
            abi::IOAS_ALLOC => self.alloc(caller).into(),
            abi::IOAS_COPY => self.copy(shared, caller).unwrap_or_else(Reply::Error),
            abi::IOAS_IOVA_RANGES => self.iova_ranges(shared, caller).into(),
            abi::IOAS_MAP => self.map(shared, caller).unwrap_or_else(Reply::Error),
            abi::IOAS_UNMAP => self.unmap(shared, caller).into(),
            // Since Linux 6.13: a program goes on with a map by address, as on the kernel that is
            // the model here (docs/check.md, "What differs from a kernel").
            abi::IOAS_MAP_FILE => Reply::Error(libc::ENOTTY),
            _ => return None,
        })
    }

    fn destroy(&mut self, caller: &Caller) -> Answer {
        let command = Struct::extensible(&caller.memory, caller.argument, 8, 8)?;
        let id = command.u32(4);
        match self.objects.get(&id) {
            None => Err(libc::ENOENT),
            // A device ends with its descriptor.
            Some(Object::Device(..)) => Err(libc::EBUSY),
            Some(Object::Ioas(_)) if self.has_device(id) => Err(libc::EBUSY),
            Some(Object::Ioas(_)) => {
                self.objects.remove(&id);
                Ok(0)
            }
        }
    }

    fn alloc(&mut self, caller: &Caller) -> Answer {
        let mut command = Struct::extensible(&caller.memory, caller.argument, 12, 12)?;
        if command.u32(4) != 0 {
            return Err(libc::EOPNOTSUPP);
        }
        let id = self.add(Object::Ioas(Arc::default()));
        command.set_u32(8, id);
        let written = command.write(&caller.memory, caller.argument);
        if written.is_err() {
            self.objects.remove(&id);
        }
        written
    }

    fn iova_ranges(&self, shared: &Shared, caller: &Caller) -> Answer {
        let mut command = Struct::extensible(&caller.memory, caller.argument, 32, 32)?;
        let (id, room) = (command.u32(4), command.u32(8));
        if command.u32(12) != 0 {
            return Err(libc::EOPNOTSUPP);
        }
        self.ioas(id)?;
        let usable = match self.has_device(id) {
            true => ranges(shared.iova_bits).to_vec(),
            false => vec![Span { first: 0, last: u64::MAX }],
        };
        let at = command.u64(16);
        for (n, range) in (0u64..u64::from(room)).zip(&usable) {
            let mut bytes = range.first.to_ne_bytes().to_vec();
            bytes.extend(range.last.to_ne_bytes());
            caller.memory.write(at.wrapping_add(n * 16), &bytes).map_err(|_| libc::EFAULT)?;
        }
        let count = u32::try_from(usable.len()).unwrap_or(0);
        command.set_u32(8, count);
        // Without a device any byte may be mapped.
        command.set_u64(24, if self.has_device(id) { PAGE } else { 1 });
        command.write(&caller.memory, caller.argument)?;
        if room < count { Err(libc::EMSGSIZE) } else { Ok(0) }
    }

    fn check(&self, shared: &Shared, id: u32, space: &Space, span: Span) -> Result<(), i32> {
        if self.has_device(id) && !is_translated(shared.iova_bits, span) {
            return Err(libc::EINVAL);
        }
        if space.overlapping(span).is_some() { Err(libc::EEXIST) } else { Ok(()) }
    }

    fn map(&self, shared: &Shared, caller: &Caller) -> Result<Reply, i32> {
        let mut command = Struct::extensible(&caller.memory, caller.argument, 40, 40)?;
        let (flags, id) = (command.u32(4), command.u32(8));
        let (vaddr, len) = (command.u64(16), command.u64(24));
        if flags & !(FIXED | WRITEABLE | READABLE) != 0 || command.u32(12) != 0 {
            return Err(libc::EOPNOTSUPP);
        }
        if flags & (WRITEABLE | READABLE) == 0 {
            return Err(libc::EINVAL);
        }
        let space = self.ioas(id)?;
        // Of a device's page tables; without one the kernel takes any byte.
        if len == 0 || self.has_device(id) && (vaddr | len) % PAGE != 0 {
            return Err(libc::EINVAL);
        }
        Span::new(vaddr, len).ok_or(libc::EOVERFLOW)?;
        let at = match flags & FIXED != 0 {
            true => command.u64(32),
            false => space.gap(len, &ranges(shared.iova_bits)).ok_or(libc::ENOSPC)?,
        };
        let span = Span::new(at, len).ok_or(libc::EOVERFLOW)?;
        if self.has_device(id) && at % PAGE != 0 {
            return Err(libc::EINVAL);
        }
        let refused = |errno| {
            space.refused(span, caller.site(), errno);
            errno
        };
        self.check(shared, id, &space, span).map_err(refused)?;
        let (read, write) = (flags & READABLE != 0, flags & WRITEABLE != 0);
        let is_locked = self.has_device(id);
        type1::add(shared, caller, &space, span, vaddr, [read, write], is_locked)
            .map_err(refused)?;
        command.set_u64(32, at);
        command.write(&caller.memory, caller.argument)?;
        Ok(Reply::Value(0, Some((space, span))))
    }

    fn copy(&self, shared: &Shared, caller: &Caller) -> Result<Reply, i32> {
        let mut command = Struct::extensible(&caller.memory, caller.argument, 40, 40)?;
        let (flags, to, from) = (command.u32(4), command.u32(8), command.u32(12));
        let (len, to_iova, from_iova) = (command.u64(16), command.u64(24), command.u64(32));
        if flags & !(FIXED | WRITEABLE | READABLE) != 0 {
            return Err(libc::EOPNOTSUPP);
        }
        if flags & (WRITEABLE | READABLE) == 0 {
            return Err(libc::EINVAL);
        }
        let source = Span::new(from_iova, len).ok_or(libc::EOVERFLOW)?;
        let entry = self.ioas(from)?.at(source.first).ok_or(libc::ENOENT)?;
        if !entry.span.holds(&source) {
            return Err(libc::ENOENT);
        }
        let write = flags & WRITEABLE != 0;
        if write && !entry.write {
            return Err(libc::EPERM);
        }
        let space = self.ioas(to)?;
        let at = match flags & FIXED != 0 {
            true => to_iova,
            false => space.gap(len, &ranges(shared.iova_bits)).ok_or(libc::ENOSPC)?,
        };
        let span = Span::new(at, len).ok_or(libc::EOVERFLOW)?;
        self.check(shared, to, &space, span)?;
        let vaddr = entry.vaddr.wrapping_add(source.first - entry.span.first);
        let (read, site) = (flags & READABLE != 0, caller.site());
        let source = (from == to).then_some(source.first);
        let copy = Entry { span, vaddr, read, write, site, serial: 0, memory: entry.memory };
        space.insert_copy(copy, source);
        command.set_u64(24, at);
        command.write(&caller.memory, caller.argument)?;
        Ok(Reply::Value(0, Some((space, span))))
    }

    fn unmap(&self, shared: &Shared, caller: &Caller) -> Answer {
        let mut command = Struct::extensible(&caller.memory, caller.argument, 24, 24)?;
        let (id, iova, len) = (command.u32(4), command.u64(8), command.u64(16));
        let space = self.ioas(id)?;
        let all = iova == 0 && len == u64::MAX;
        let span = match all {
            true => Span { first: 0, last: u64::MAX },
            false => {
                Span::new(iova, len).ok_or(if len == 0 { libc::EINVAL } else { libc::EOVERFLOW })?
            }
        };
        if !all {
            let (first, last) = (space.at(span.first), space.at(span.last));
            if first.is_some_and(|map| map.span.first != span.first)
                || last.is_some_and(|map| map.span.last != span.last)
            {
                let text = format!("an unmap of {span} would cut a mapping, and was refused");
                shared.findings.add(&findings::UNMAP_PART, text, || vec![caller.site().describe()]);
                return Err(libc::ENOENT);
            }
        }
        let removed = type1::remove(shared, caller, &space, span);
        if removed == 0 && !all {
            return Err(libc::ENOENT);
        }
        command.set_u64(16, removed);
        command.write(&caller.memory, caller.argument)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::abi;
    use crate::process::Memory;

    #[repr(align(4096))]
    struct Page([u8; 4096]);

    #[test]
    fn maps_can_be_undone() {
        let shared = Shared { findings: Arc::default(), functions: Vec::new(), iova_bits: 39 };
        let memory = Arc::new(Memory::of(std::process::id()).unwrap());
        let mut iommufd = Iommufd::default();
        let mut call = |request: u32, words: &[u32]| {
            let caller = Caller::new(std::process::id(), 0, words.as_ptr() as u64, memory.clone());
            iommufd.call(&shared, &caller, request).unwrap()
        };
        let page = Box::new(Page([0; 4096]));
        let vaddr = std::ptr::from_ref(&*page) as u64;
        let half = |value: u64| u32::try_from(value & 0xffff_ffff).unwrap();
        let (low, high) = (half(vaddr), half(vaddr >> 32));
        assert!(matches!(call(abi::IOAS_ALLOC, &[12, 0, 0]), Reply::Value(0, None)));
        let flags = FIXED | WRITEABLE | READABLE;
        let map = [40, flags, 1, 0, low, high, 4096, 0, 0x10_0000, 0];
        let Reply::Value(0, Some((space, span))) = call(abi::IOAS_MAP, &map) else { panic!() };
        assert_eq!((span, space.count()), (Span::new(0x10_0000, 4096).unwrap(), 1));
        let copy = [40, flags, 1, 1, 4096, 0, 0x20_0000, 0, 0x10_0000, 0];
        let Reply::Value(0, Some((space, span))) = call(abi::IOAS_COPY, &copy) else { panic!() };
        assert_eq!((span, space.count()), (Span::new(0x20_0000, 4096).unwrap(), 2));
        // One that is refused leaves the mapping that is there.
        assert!(matches!(call(abi::IOAS_MAP, &map), Reply::Error(libc::EEXIST)));
        // Later kernels map a file; this one is not told apart from an earlier one by a finding.
        assert!(matches!(call(abi::IOAS_MAP_FILE, &map), Reply::Error(libc::ENOTTY)));
        assert_eq!(page.0[0], 0);
    }
}
