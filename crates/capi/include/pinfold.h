/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * pinfold.h - DMA memory for user space: libpinfold(3) describes it.
 *
 * A function returns 0 or a positive result, or -errno; pf_strerror_last() has the message. A new
 * object is stored through the last parameter, and ends with the function `*_destroy` of its kind;
 * put, free and recycle are for blocks, memory and pages. Handles are opaque: a handle that is
 * stale, of another kind or destroyed twice gives -EBADF, and one that another thread is using
 * exclusively -EBUSY. A call waits for a `*_destroy` of another thread to be decided, and one that
 * is refused refuses no other call but another `*_destroy`.
 *
 * A call that "allocates" gives -ENOMEM if there is no memory for data whose size depends on the
 * caller's numbers; without memory for small data of fixed size (an object, a message: some kB), it
 * ends the process. A call that succeeds allocates only where its comment says so, except
 * `*_destroy`; one that is refused may allocate its message. A software domain (pf_domain_soft) has
 * a model of the hardware in the process, which may allocate small data in each call that maps or
 * revokes memory, or looks whether a flush has completed.
 * Generated from the library's source: do not edit.
 *
 * A struct that may grow begins with `struct_size`: set it to its sizeof, and unused fields to 0.
 * The others do not change while the library has this soname.
 *
 * What else a program may do, at any moment:
 *
 * signals     The library installs no handler and no alternate stack, and leaves the masks of the
 *             program's threads as they are. Its own threads block all signals: one that the program
 *             takes by a signalfd or in a thread of its own does not arrive there. A handler may
 *             interrupt any call, which goes on (no EINTR). It must not call the library: no
 *             function is async-signal-safe.
 * fork        A child that has a copy of the memory (fork, _Fork, clone) of a process with objects
 *             gets -EPERM from every call: devices do not reach its memory. Fork before the first
 *             call, or exec. A child that shares the memory (vfork, CLONE_VM) is for _exit and exec,
 *             as in POSIX: it creates no object (-EPERM).
 * exit        exit(), quick_exit(), and a return from main(), while other threads are in calls, are
 *             allowed; so are calls in handlers of atexit() and at_quick_exit(), and in destructors
 *             of a thread's values. Objects need not be destroyed before the process ends: its
 *             memory is unmapped from devices by the kernel. The end of a thread ends no object.
 * cancel      pthread_cancel() acts after a call, never inside it, nor in a hook. With
 *             PTHREAD_CANCEL_ASYNCHRONOUS a thread must not call the library.
 * hooks       A hook (pf_trace_set) must return. pthread_exit() or an exception in it ends the
 *             process; after a longjmp() out of it the object of the call stays in use for good
 *             (-EBUSY), and pthread_cancel() is disabled in the thread until that enables it.
 * copies      dlclose() keeps the library in the process, and dlopen() finds it again, with its
 *             objects. Of several copies (linked statically and shared, dlmopen, an older version)
 *             each refuses the handles of the others (-EBADF), and knows the memory of its own
 *             objects only: give no memory to two of them.
 * descriptors Those of the library are not the program's to close: closefrom() and the like come
 *             before the first call. Afterwards a call that needs one fails, or uses what the program
 *             has opened in its place. One that a call has returned is a duplicate of the library's:
 *             a program that closes it stops only itself from waiting for it, and what it opens in
 *             its place stays open (where the kernel has kcmp()).
 * identity    setuid(), chroot(), chdir(), umask() and limits may change: existing objects are not
 *             affected, later ones are subject to the new values. */


#ifndef PINFOLD_H
#define PINFOLD_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* The result of these functions says whether the memory is there, or is the program's again. */
#if defined(__GNUC__) && !defined(PF_CHECKED)
#define PF_CHECKED __attribute__((__warn_unused_result__))
#elif !defined(PF_CHECKED)
#define PF_CHECKED
#endif

/*
 Bits of pf_arena_opts.sources: the sources of the memory. Tried in the order of the bits.
 */
#define PF_SOURCE_HUGETLB_1G (1 << 0)

/*
 2 MiB pages of the hugetlb pool.
 */
#define PF_SOURCE_HUGETLB_2M (1 << 1)

/*
 Transparent hugepages.
 */
#define PF_SOURCE_THP (1 << 2)

/*
 4 KiB pages.
 */
#define PF_SOURCE_PLAIN (1 << 3)

/*
 A memfd of 4 KiB pages: pf_arena_region() has its file descriptor.
 */
#define PF_SOURCE_MEMFD (1 << 4)

/*
 A memfd of 2 MiB pages.
 */
#define PF_SOURCE_MEMFD_2M (1 << 5)

/*
 A memfd of 1 GiB pages.
 */
#define PF_SOURCE_MEMFD_1G (1 << 6)

/*
 For pf_arena_opts.policy: a device reaches only memory that pf_map() or a request maps, and the
 memory of pools, at the addresses in their blocks. The default: 0 is the same.
 */
#define PF_POLICY_PER_USE 1

/*
 For pf_arena_opts.policy: all of the arena is mapped while it lives, so an address for the
 device is known at once, and devices also reach memory that is not mapped, or no longer.
 */
#define PF_POLICY_WHOLE 2

/*
 For pf_domain_vfio() and pf_domain_opts.iommu: iommufd where the kernel offers it for the
 device, or for devices, else type 1.
 */
#define PF_IOMMU_BEST 0

/*
 For pf_domain_vfio() and pf_domain_opts.iommu: VFIO's type 1 interface.
 */
#define PF_IOMMU_TYPE1 1

/*
 For pf_domain_vfio() and pf_domain_opts.iommu: iommufd.
 */
#define PF_IOMMU_IOMMUFD 2

/*
 The return value of calls that end a mapping if devices still reach the memory: it is of an
 arena of PF_POLICY_WHOLE, or registered.
 */
#define PF_STAYS_MAPPED 1

/*
 For pf_nvme_info.flags: the controller discards (PF_DISCARD).
 */
#define PF_NVME_DISCARD (1 << 0)

/*
 For pf_nvme_info.flags: what is discarded reads as zeroes.
 */
#define PF_NVME_DISCARD_ZEROES (1 << 1)

/*
 For pf_pool_opts.flags: free blocks are filled with a pattern, and writes to them counted
 (pf_pool_stats.damaged). Each call takes a lock, and time proportional to the block.
 */
#define PF_POOL_DEBUG (1 << 0)

/*
 In pf_fault.kind: nothing is mapped at the address.
 */
#define PF_FAULT_NOT_MAPPED 1

/*
 In pf_fault.kind: the mapping does not allow the device to read.
 */
#define PF_FAULT_NO_READ 2

/*
 In pf_fault.kind: the mapping does not allow the device to write.
 */
#define PF_FAULT_NO_WRITE 3

/*
 In pf_fault.kind: there is no translation for another reason: an address that is too large, or a
 damaged table.
 */
#define PF_FAULT_OTHER 4

/*
 For pf_queue_opts.protect: the memory is mapped for its request, and revoked when that has
 completed; pf_complete() waits for the flush, one for all that it finds. Use memory that
 pf_alloc() or pf_frames_fill() returns for an arena of PF_POLICY_PER_USE: what stays mapped
 (that of PF_POLICY_WHOLE, of registrations, and of pools) is EINVAL, as it could not be revoked.
 The default: 0 is the same.
 */
#define PF_PROTECT_STRICT 1

/*
 For pf_queue_opts.protect: the same without waiting: a request is reported by a later call, when
 its flush has completed.
 */
#define PF_PROTECT_REVOKE 2

/*
 For pf_queue_opts.protect: as PF_PROTECT_REVOKE, with one flush for all that a call finds.
 */
#define PF_PROTECT_BATCH 3

/*
 For pf_queue_opts.protect: no protection: the device reaches the memory for as long as that is
 in the domain, also after its request. It must stay mapped (PF_POLICY_WHOLE, registered, or a
 pool's).
 */
#define PF_PROTECT_STATIC 4

/*
 For pf_queue_opts.flags: the controller raises an interrupt, so that pf_queue_wait() sleeps and
 pf_queue_fd() has a descriptor.
 */
#define PF_QUEUE_INTERRUPT (1 << 0)

/*
 Reads from the controller into the memory of `iov`.
 */
#define PF_READ 1

/*
 Writes the memory of `iov` to the controller.
 */
#define PF_WRITE 2

/*
 Makes the data of reported writes durable. After an error earlier writes may be lost, and a
 later flush that succeeds does not prove the contrary.
 */
#define PF_FLUSH 3

/*
 Discards `len` bytes from `offset`. The controller may still keep them.
 */
#define PF_DISCARD 4

/*
 Sends `command`, an NVM command of the program's own, with the memory of `iov` for its data.
 */
#define PF_COMMAND 5

/*
 In pf_completion.status: the device may still reach the memory of the request, which stays in
 use: pf_free() and pf_reg_destroy() refuse it. The request was given up, and the memory is in
 use until pf_nvme_destroy() has disabled the controller; or its flush has failed, and it is for
 good; or, with PF_LATE, for less.
 */
#define PF_LOST 2147483648

/*
 In pf_completion.status, with PF_LOST: the device has ended the request, but the flush of its
 access is late: the memory stays in use until a call for the queue finds that it has completed,
 without another report.
 */
#define PF_LATE 1073741824

/*
 The most payloads of a request.
 */
#define PF_MOST_PAYLOADS 8

/*
 In pf_done.end: no device reaches the payloads of the request by its mappings. Devices reach whole
 pages of 4096 bytes: bytes of a page of which another request or mapping has a part are reached
 until that has ended too.
 */
#define PF_END_QUIESCED 0

/*
 In pf_done.end: the device no longer works on the request, and its memory is the program's
 again; devices still reach at least one of its payloads, which is mapped for its lifetime (its
 arena has PF_POLICY_WHOLE, or it is registered, or a pool's). The value of PF_STAYS_MAPPED.
 */
#define PF_END_STAYS_MAPPED 1

/*
 In pf_done.end: the flush has not completed in time, and a device may still reach the payloads,
 which stay in use. The request is reported again, with another end.
 */
#define PF_END_LATE 2

/*
 In pf_done.end: the flush never completes, and a device may reach the payloads for good: they
 stay in use, and pf_quarantine() counts them.
 */
#define PF_END_LOST 3

/*
 The version of this header: major << 16 | minor << 8 | patch. pf_version() has the library's.
 */
#define PF_VERSION 512

/*
 The way a counter changes.
 */
enum pf_counter_kind {
  /*
   A count that grows: events so far.
   */
  PF_COUNTER_TOTAL = 0,
  /*
   A count that grows and shrinks: the current value.
   */
  PF_COUNTER_LEVEL = 1,
  /*
   The highest value so far.
   */
  PF_COUNTER_PEAK = 2,
};

/*
 The access of a device to mapped memory.
 */
enum pf_dir {
  /*
   Read it.
   */
  PF_TO_DEVICE = 1,
  /*
   Write it.
   */
  PF_FROM_DEVICE = 2,
  /*
   Both.
   */
  PF_BIDIR = 3,
};

/*
 The kind of an event.
 */
enum pf_event_kind {
  /*
   Memory was allocated: `va`, `len`.
   */
  PF_EVENT_ALLOC = 1,
  /*
   Memory was freed.
   */
  PF_EVENT_FREE = 2,
  /*
   Memory was mapped: `va`, `iova`, `len`.
   */
  PF_EVENT_MAP = 3,
  /*
   A mapping was revoked.
   */
  PF_EVENT_REVOKE = 4,
};

/*
 Pinned memory.
 */
typedef struct pf_arena_t pf_arena_t;

/*
 One thread's cache of a pool's blocks.
 */
typedef struct pf_cache_t pf_cache_t;

/*
 A PCI device that the program drives.
 */
typedef struct pf_device_t pf_device_t;

/*
 One I/O address space.
 */
typedef struct pf_domain_t pf_domain_t;

/*
 One thread's handle of an arena.
 */
typedef struct pf_frames_t pf_frames_t;

/*
 An NVMe controller.
 */
typedef struct pf_nvme_t pf_nvme_t;

/*
 One thread's handle of a domain, for mappings.
 */
typedef struct pf_owner_t pf_owner_t;

/*
 A pool of pages. Calls of its consumer and of other threads use it at the same time.
 */
typedef struct pf_pages_t pf_pages_t;

/*
 A pool of blocks of one size.
 */
typedef struct pf_pool_t pf_pool_t;

/*
 A device model's connection to memory.
 */
typedef struct pf_port_t pf_port_t;

/*
 One thread's queue of a controller.
 */
typedef struct pf_queue_t pf_queue_t;

/*
 Memory that the program already has, in a domain.
 */
typedef struct pf_reg_t pf_reg_t;

/*
 A protected request loop.
 */
typedef struct pf_requests_t pf_requests_t;

/*
 A command, as the NVM Express specification numbers its words: for pf_nvme_admin(), or of a
 request (PF_COMMAND). Set `struct_size` to its sizeof.
 */
struct pf_nvme_command {
  /*
   sizeof(struct pf_nvme_command).
   */
  size_t struct_size;
  /*
   The opcode. Its lowest two bits are the direction of its data: 0: none; 1: to the
   controller; 2: from it.
   */
  uint32_t opcode;
  /*
   The namespace; 0 or 0xffffffff where the command is not about one.
   */
  uint32_t nsid;
  /*
   CDW10.
   */
  uint32_t cdw10;
  /*
   CDW11.
   */
  uint32_t cdw11;
  /*
   CDW12.
   */
  uint32_t cdw12;
  /*
   CDW13.
   */
  uint32_t cdw13;
  /*
   CDW14.
   */
  uint32_t cdw14;
  /*
   CDW15.
   */
  uint32_t cdw15;
  /*
   The library's: DW0 of the completion of an admin command.
   */
  uint32_t result;
  /*
   The library's: bits 31:17 of DW3 of an admin command's completion; 0 where there is none.
   */
  uint32_t status;
};

/*
 Options of an arena. Set `struct_size` to its sizeof, and unused fields to 0.
 */
struct pf_arena_opts {
  /*
   sizeof(struct pf_arena_opts).
   */
  size_t struct_size;
  /*
   Bytes; rounded up to the page size of the source.
   */
  uint64_t size;
  /*
   The caller's own memory, at a multiple of 4096, `size` bytes; NULL: from `sources`. All of
   its pages are faulted in, and must be readable and writable. Until pf_arena_destroy() has
   returned 0 the caller keeps it mapped so, and its bytes are no other arena's, no
   registration's and no pool's of this process, in any domain.

   It is not copied to children (MADV_DONTFORK), locked (mlock2() with MLOCK_ONFAULT) where
   RLIMIT_MEMLOCK allows it and the domain's mappings do not pin it, and bound to the NUMA node
   that is asked for. pf_arena_destroy() undoes that, and a call that is refused does: except
   where the caller had set it before pf_arena_create(), by /proc/self/smaps. What the caller
   sets between the two may be undone with it.
   */
  void *va;
  /*
   PF_SOURCE_*; 0: hugepages if there are any, else plain pages.
   */
  uint32_t sources;
  /*
   PF_POLICY_*; 0: PF_POLICY_PER_USE.
   */
  uint32_t policy;
  /*
   The number of the NUMA node plus one; 0: any.
   */
  uint32_t numa_node_plus_one;
  /*
   0.
   */
  uint32_t reserved;
};

/*
 A region of memory, as libblkio's `struct blkio_mem_region` describes it, with its address for
 devices.
 */
struct pf_region {
  /*
   sizeof(struct pf_region): the caller sets it.
   */
  size_t struct_size;
  /*
   Its address in this process.
   */
  void *addr;
  /*
   Bytes.
   */
  size_t len;
  /*
   Its address for the devices of the arena's first domain; 0 unless it is mapped as a whole.
   */
  uint64_t iova;
  /*
   The offset of the memory in the file.
   */
  int64_t fd_offset;
  /*
   The file descriptor, which stays the arena's: duplicate it to keep it. -1: none.
   */
  int fd;
  /*
   0.
   */
  uint32_t flags;
};

/*
 A block of memory that a device can reach, or a part of one.
 */
typedef struct pf_block_t {
  /*
   Its address in this process.
   */
  void *va;
  /*
   Its address for the devices of its arena's first domain; or as pf_pool_add() was told.
   */
  uint64_t iova;
  /*
   Bytes.
   */
  uint32_t len;
  /*
   The caller's own: the library neither reads nor writes it.
   */
  uint32_t tag;
} pf_block_t;

/*
 The registers of a device, mapped: for pf_read32() and the like.
 */
struct pf_bar {
  /*
   The address of the registers in this process.
   */
  void *addr;
  /*
   Bytes.
   */
  uint64_t len;
};

/*
 Options of a domain behind the software IOMMU, for tests of what a program does when revocations
 go wrong. Set `struct_size` to its sizeof, and unused fields to 0.
 */
struct pf_domain_soft_opts {
  /*
   sizeof(struct pf_domain_soft_opts).
   */
  size_t struct_size;
  /*
   The duration of a flush in nanoseconds; 0: 1 us.
   */
  uint64_t flush_ns;
  /*
   The nanoseconds that a call waits for a flush before it is late (pf_unmap(), tickets); 0: 5
   s. A request loop has a limit of its own (pf_requests_opts.flush_ns).
   */
  uint64_t timeout_ns;
  /*
   The first flush, counted from 1, that never completes, as those after it: a request is
   PF_END_LATE for good. 0: none.
   */
  uint64_t hang_from;
  /*
   The first flush, counted from 1, that the IOMMU refuses for good: it has failed, and a request
   is PF_END_LOST. 0: none.
   */
  uint64_t fail_from;
};

/*
 Options of a domain for real devices. Set `struct_size` to its sizeof, and unused fields to 0.
 */
struct pf_domain_opts {
  /*
   sizeof(struct pf_domain_opts).
   */
  size_t struct_size;
  /*
   The kernel's interface: PF_IOMMU_*; 0: PF_IOMMU_BEST.
   */
  uint32_t iommu;
  /*
   The number of an address space (IOAS) of the program's `iommufd`, in which the domain is
   then; 0: the domain makes one of its own.
   */
  uint32_t ioas;
  /*
   With `ioas`: the first address that the domain may use there, a multiple of 4096.
   */
  uint64_t iova;
  /*
   With `ioas`: how many bytes from `iova` on are the domain's alone, a multiple of 4096. 0:
   all addresses are, and nobody else maps there.
   */
  uint64_t iova_len;
  /*
   With `ioas`: the descriptor of /dev/iommu that has it. It stays the program's.
   */
  int iommufd;
  /*
   0.
   */
  uint32_t reserved;
};

/*
 The name of a mapping, from pf_map(), for the owner that made it. All zeros name none.
 */
typedef struct pf_map_t {
  /*
   The owner's slot, and half of the owner's number.
   */
  uint64_t id;
  /*
   The slot's generation, and the other half.
   */
  uint64_t gen;
} pf_map_t;

/*
 A ticket, which a thread waits for until memory is its own again: see pf_revoke_many(). Valid
 for the owner that made it. 0 is none.
 */
typedef struct pf_ticket_t {
  /*
   Its number, greater than that of the owner's ticket before. No two tickets have one number.
   */
  uint64_t seq;
} pf_ticket_t;

/*
 Memory of a domain that a device may still reach although its mapping has ended. Set
 `struct_size` to its sizeof.
 */
struct pf_held {
  /*
   sizeof(struct pf_held).
   */
  size_t struct_size;
  /*
   Mappings whose flush is late: their memory stays in use until it completes.
   */
  uint64_t deferred;
  /*
   The bytes of their pages.
   */
  uint64_t deferred_bytes;
  /*
   Mappings whose flush never completes: their memory stays in use for good.
   */
  uint64_t quarantined;
  /*
   The bytes of their pages.
   */
  uint64_t quarantined_bytes;
  /*
   Bytes of whole arenas and registrations, of any domain, that could not be unmapped.
   */
  uint64_t process_bytes;
  /*
   Requests that a program has given up (pf_requests_lost()), which their device may still work
   on: their memory stays in use until pf_requests_completed() or pf_requests_stopped(), and for
   good where their loop has ended.
   */
  uint64_t lost;
  /*
   The bytes of the pages of their payloads.
   */
  uint64_t lost_bytes;
};

/*
 Options of a controller. Set `struct_size` to its sizeof, and unused fields to 0.
 */
struct pf_nvme_opts {
  /*
   sizeof(struct pf_nvme_opts).
   */
  size_t struct_size;
  /*
   The device's address, as it was attached to the domain; NULL: a model of a controller, which
   runs in a thread of this process, behind the software IOMMU.
   */
  const char *bdf;
  /*
   A model's medium: a file, which is created if there is none, and grown to `size`; NULL:
   memory.
   */
  const char *path;
  /*
   A model's size in bytes; 0: that of the file. At most 16 TiB in memory.
   */
  uint64_t size;
  /*
   A model's block: 512 or 4096; 0: 512.
   */
  uint32_t block_bytes;
  /*
   0.
   */
  uint32_t flags;
};

/*
 The capabilities of a controller and one of its namespaces.
 */
struct pf_nvme_info {
  /*
   sizeof(struct pf_nvme_info): the caller sets it.
   */
  size_t struct_size;
  /*
   Bytes of the namespace.
   */
  uint64_t capacity;
  /*
   The most bytes of one request.
   */
  uint64_t max_transfer;
  /*
   The most bytes of one command: a larger request becomes several.
   */
  uint32_t max_command;
  /*
   The unit of offsets and lengths, bytes.
   */
  uint32_t block_bytes;
  /*
   The most requests of a queue.
   */
  uint32_t max_depth;
  /*
   The namespace's number.
   */
  uint32_t nsid;
  /*
   PF_NVME_* bits.
   */
  uint32_t flags;
  /*
   0.
   */
  uint32_t reserved;
};

/*
 Options of a pool. Set `struct_size` to its sizeof, and unused fields to 0.
 */
struct pf_pool_opts {
  /*
   sizeof(struct pf_pool_opts).
   */
  size_t struct_size;
  /*
   The name of the pool in reports and messages; NULL: "pool".
   */
  const char *name;
  /*
   Bytes of a block, 1 to 1 GiB: raised to 16, and rounded up to `align`.
   */
  size_t size;
  /*
   The alignment of blocks: a power of two; 0: none.
   */
  size_t align;
  /*
   Blocks do not cross a multiple of it: a power of two of at least a block; 0: no boundary.
   */
  size_t boundary;
  /*
   Blocks that the pool acquires at once, and keeps.
   */
  uint64_t minimum;
  /*
   Blocks after which it acquires no more memory; the last chunk may exceed it by less than the
   blocks of a page. 0: no maximum.
   */
  uint64_t maximum;
  /*
   Bytes of free blocks that a cache keeps at most: at least one block, at most 1,024 blocks.
   0: 512 KiB.
   */
  uint64_t cached_bytes;
  /*
   PF_POOL_DEBUG.
   */
  uint32_t flags;
  /*
   0.
   */
  uint32_t reserved;
};

/*
 A pool's counters. Exact while no other thread allocates or frees.
 */
struct pf_pool_stats {
  /*
   sizeof(struct pf_pool_stats): set by the caller.
   */
  size_t struct_size;
  /*
   Bytes of a block, after rounding.
   */
  uint64_t block_bytes;
  /*
   All blocks.
   */
  uint64_t blocks;
  /*
   Blocks that are allocated.
   */
  uint64_t in_use;
  /*
   Free blocks: `cached` and those that every cache can have at once.
   */
  uint64_t free;
  /*
   Free blocks that caches keep for their threads.
   */
  uint64_t cached;
  /*
   The most blocks that were in use or cached at a time.
   */
  uint64_t peak;
  /*
   Pieces of memory: chunks of the arena, and added memory.
   */
  uint64_t chunks;
  /*
   Bytes of these.
   */
  uint64_t bytes;
  /*
   Free blocks that were found overwritten; 0 without PF_POOL_DEBUG.
   */
  uint64_t damaged;
};

/*
 The faults of a port. Set `struct_size` to its sizeof.
 */
struct pf_fault {
  /*
   sizeof(struct pf_fault).
   */
  size_t struct_size;
  /*
   The number of accesses of the port that have faulted. If it is 0, so are the other fields.
   */
  uint64_t count;
  /*
   The first address that the last faulting access did not reach.
   */
  uint64_t iova;
  /*
   The reason for it: PF_FAULT_*.
   */
  uint32_t kind;
  /*
   0.
   */
  uint32_t reserved;
};

/*
 Options of a queue. Set `struct_size` to its sizeof, and unused fields to 0.
 */
struct pf_queue_opts {
  /*
   sizeof(struct pf_queue_opts).
   */
  size_t struct_size;
  /*
   The most requests between pf_submit() and their report by pf_complete(): 1 to
   pf_nvme_info.max_depth.
   A request that waits for its flush counts. With PF_PROTECT_REVOKE or PF_PROTECT_BATCH, give the
   queue more than the program keeps at the controller, so that flushes overlap.
   */
  uint32_t depth;
  /*
   PF_PROTECT_*; 0: PF_PROTECT_STRICT.
   */
  uint32_t protect;
  /*
   PF_QUEUE_* bits.
   */
  uint32_t flags;
  /*
   0.
   */
  uint32_t reserved;
};

/*
 A request. Memory that it points to is read by pf_submit() only.
 */
struct pf_request {
  /*
   PF_READ, PF_WRITE, PF_FLUSH, PF_DISCARD or PF_COMMAND.
   */
  uint32_t op;
  /*
   The namespace, from 1.
   */
  uint32_t nsid;
  /*
   Its first byte: a multiple of the block. PF_FLUSH, PF_COMMAND: 0.
   */
  uint64_t offset;
  /*
   PF_DISCARD: bytes, a multiple of the block; else 0, or the sum of `iov`.
   */
  uint64_t len;
  /*
   The memory of PF_READ, PF_WRITE and PF_COMMAND: a multiple of the block in all, and at most
   pf_nvme_info.max_transfer. Each entry is inside one allocation of the domain or one
   registration. A controller without SGLs (a model has none) can use scattered memory if the
   first entry begins at a multiple of 4, the others at a multiple of 4096, and all but the
   last end at one.
   */
  const struct iovec *iov;
  /*
   Entries of it: 1 to 1024; PF_FLUSH, PF_DISCARD, and PF_COMMAND without data: 0.
   */
  uint32_t iovcnt;
  /*
   0.
   */
  uint32_t flags;
  /*
   The caller's; its completion has it.
   */
  uint64_t user_data;
  /*
   Of PF_COMMAND, for the namespace `nsid` (its own `nsid` is that, or 0), with PRPs or an SGL
   for `iov` as the library chooses; else NULL. It is one command at the controller, of at most
   pf_nvme_info.max_command bytes, and not sent again after it may have been carried out. A
   read, a write, a comparison, and write zeroes, write uncorrectable and verify are ordered
   with other requests by their blocks, and must have the memory of these; any other command
   counts as one for all of the namespace, and the program is responsible for the length in it:
   memory beyond `iov` is not mapped for it.
   */
  const struct pf_nvme_command *command;
};

/*
 The report of a request.
 */
struct pf_completion {
  /*
   The request's.
   */
  uint64_t user_data;
  /*
   0, or -errno: EIO (the controller's `status`); ETIMEDOUT (given up); ECANCELED (aborted
   because it took too long, or the controller was disabled); ENODEV (the controller is gone);
   ESTALE (the namespace has changed); EINVAL (the controller cannot be given a part of it).
   */
  int32_t result;
  /*
   The controller's status: bits 31:17 of the completion's DW3; and PF_LOST, PF_LATE.
   */
  uint32_t status;
  /*
   DW0 of the completion of its last command.
   */
  uint32_t value;
  /*
   0.
   */
  uint32_t reserved;
};

/*
 A counter of an object.
 */
struct pf_counter {
  /*
   Its name, as in JSON and in docs/counters.md. All strings stay valid for good.
   */
  const char *name;
  /*
   "count", "bytes" or "ns".
   */
  const char *unit;
  /*
   Its meaning, in a sentence.
   */
  const char *meaning;
  /*
   Its value.
   */
  uint64_t value;
  /*
   The way it changes: enum pf_counter_kind.
   */
  uint32_t kind;
  /*
   0.
   */
  uint32_t reserved;
};

/*
 Options of a request loop. Set `struct_size` to its sizeof, and unused fields to 0.
 */
struct pf_requests_opts {
  /*
   sizeof(struct pf_requests_opts).
   */
  size_t struct_size;
  /*
   The nanoseconds that a flush may take before its request is late; 0: 5 s.
   */
  uint64_t flush_ns;
  /*
   The most requests at the device, at least 1.
   */
  uint32_t depth;
  /*
   The number of further requests that may wait for their flush, be late or lost; 0: as many as
   `depth`. Both together are at most 1048576, and each needs some 1.2 kB, which are allocated
   at once.
   */
  uint32_t held;
  /*
   When access ends: PF_PROTECT_*; 0: PF_PROTECT_STRICT. Memory that stays mapped for its
   lifetime may be a payload with each of them, and is then reported as PF_END_STAYS_MAPPED.
   PF_PROTECT_STATIC accepts no other memory.
   */
  uint32_t protect;
  /*
   0.
   */
  uint32_t flags;
};

/*
 Memory of a request.
 */
struct pf_payload {
  /*
   The memory: any bytes of one allocation of an arena in the domain, of one block, or of one
   registration. Of a block it is checked that they are its pool's, not where it ends: the
   device reaches the whole pages of 4096 bytes around them in any case.
   */
  void *va;
  /*
   Bytes, at least 1.
   */
  size_t len;
  /*
   The device's access to it: enum pf_dir.
   */
  uint32_t dir;
  /*
   0.
   */
  uint32_t reserved;
};

/*
 The report of a request.
 */
struct pf_done {
  /*
   The request. Unless it is PF_END_LATE, no call takes the token any more.
   */
  uint64_t token;
  /*
   The result passed to pf_requests_completed(); else 0.
   */
  uint64_t result;
  /*
   The way the device's access ended: PF_END_*.
   */
  uint32_t end;
  /*
   0, or -errno for PF_END_LATE and PF_END_LOST: ETIMEDOUT, EIO.
   */
  int32_t error;
};

/*
 One event.
 */
struct pf_event {
  /*
   sizeof(struct pf_event), as the library knows it: what is behind that is not there.
   */
  size_t struct_size;
  /*
   The kind: `enum pf_event_kind`.
   */
  uint32_t kind;
  /*
   Reserved: 0.
   */
  uint32_t reserved;
  /*
   The memory, as the program addresses it.
   */
  void *va;
  /*
   The memory, as a device addresses it; 0 where it has no such address.
   */
  uint64_t iova;
  /*
   Bytes.
   */
  uint64_t len;
  /*
   The instruction behind the call of the library.
   */
  const void *caller;
  /*
   The handle that was used.
   */
  uint64_t handle;
};

/*
 Called in the thread of the event, inside its call: it must not call the library, and must not
 unwind or jump out of it.
 */
typedef void (*pf_trace_fn)(void *arg, const struct pf_event *event);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 Sends an admin command, and waits for its completion, for at most a minute. Its data are copied
 through a page of the library's: the controller reaches none of the program's memory.

 Commands that change state on which the library relies are refused: its queues (create, delete),
 aborts, event requests, doorbells, keep alive, virtualization, and "set features" of the number
 of queues, of events, of the host memory buffer, of keep alive, of the host's behavior and of
 the command set profile. After a command that changes namespaces (format, sanitize, management,
 attachment) they are identified again, and queues refuse a namespace whose blocks have changed
 (ESTALE). Opcodes of the standard that are newer than the library are refused, too; those of
 vendors (from 0xc0) are sent, and must not move more than 4096 bytes.

 @nvme: the controller.
 @command: the command; `result` and `status` are stored there.
 @data: the first `len` bytes of its data, with zeroes behind them; or where the first `len`
 bytes are stored that the controller has written, zeroes after these. NULL if `len` is 0. After
 an error nothing is stored there.
 @len: at most 4096; 0 for a command without data.

 Return: 0, or -errno: EIO (the controller refuses the command: its `status`; or has failed);
 EACCES (it changes what the library relies on: the message says what); EINVAL (an unknown
 opcode, more data than 4096 bytes, `len`, `struct_size`); ETIMEDOUT (no completion: nothing more
 is accepted); ENODEV (it is gone); E2BIG; EFAULT; EBADF.
 Thread: any; one at a time waits. May allocate small amounts: for events of the controller, and
 4096 bytes, and some 200 for each namespace, where namespaces are identified again. Since 0.2.

 */
int pf_nvme_admin(struct pf_nvme_t *nvme, struct pf_nvme_command *command, void *data, size_t len) PF_CHECKED;

/*
 Obtains pinned memory and maps it into a domain.

 @domain: the domain.
 @opts: the options; `size` at least.
 @out: where the handle is stored.

 Return: 0, or -errno: EINVAL (no size; unknown sources, policy or reserved fields; `va` or
 `size` is not a multiple of 4096; no such NUMA node); EOVERFLOW (more than 1 TiB); E2BIG (fields
 of a newer version); EEXIST (part of `va` is an arena's, registered or a pool's, in any domain
 of the process: pf_arena_map_into() shares an arena between domains); ENOMEM (the message lists
 each source that was tried, and what it lacks; or the 8 bytes that describe each page); EBADF;
 EFAULT (a page of `va` is not mapped, not readable and writable, beyond the end of its file, or
 has no hugepage left: the message has the first); ENFILE.
 Thread: any. Allocates: 8 bytes for each 4096 of the arena, ENOMEM without them. Faults in `va`,
 for which it waits for the handler of a userfaultfd. Ends with pf_arena_destroy(). Since 0.2.

 */
int pf_arena_create(struct pf_domain_t *domain,
                    const struct pf_arena_opts *opts,
                    struct pf_arena_t **out) PF_CHECKED;

/*
 Maps an arena into another domain, too: a device there reaches it as well.

 @arena: the arena.
 @domain: the domain.
 @iova: where the arena's address for its devices is stored (0 unless PF_POLICY_WHOLE); NULL: not
 needed.

 Return: 0, or -errno: EEXIST (part of its memory is registered in this domain); ENOMEM, ENOSPC
 (the domain's limits); EBADF.
 Thread: any. Allocates. It stays mapped until pf_arena_destroy(). Since 0.2.

 */
int pf_arena_map_into(struct pf_arena_t *arena, struct pf_domain_t *domain, uint64_t *iova) PF_CHECKED;

/*
 Puts an arena in the table of an io_uring of the program: READ_FIXED and WRITE_FIXED with this
 index then use its memory, without the kernel pinning it for each. The arena stays what it is,
 in its domains.

 @arena: the arena, of at most 1 GiB.
 @ring_fd: the ring, with a table of buffers (io_uring_register_buffers_sparse() makes one). It
 is kept open until pf_uring_unregister_arena().
 @index: the place in the table; what is there is replaced, and is not in the table any more.

 Return: 0, or -errno, as pf_uring_register(). Nothing has changed then.
 Thread: any, unless the ring is one thread's. Linux 5.13. Allocates. Since 0.2.
 */
int pf_uring_register_arena(struct pf_arena_t *arena, int ring_fd, unsigned int index) PF_CHECKED;

/*
 Removes an arena from the table of a ring. Requests in flight keep its pages until they have
 completed: the program waits for them before it frees their memory.

 @arena: the arena.
 @ring_fd: the ring, as pf_uring_register_arena() got it; it may have been closed.
 @index: the place in the table.

 Return: 0, or -errno, as pf_uring_unregister().
 Thread: any, unless the ring is one thread's. Since 0.2.
 */
int pf_uring_unregister_arena(struct pf_arena_t *arena, int ring_fd, unsigned int index) PF_CHECKED;

/*
 Destroys an arena: its memory is unmapped and freed, or is the caller's again.

 @arena: the arena; NULL does nothing.

 Return: 0, or -errno: EBUSY (memory of it is allocated, mapped, in a request, in a pool, or in
 the table of a ring, or a pool, a controller or a handle of frames exists that may allocate from
 it: the message says how many bytes, and how many of these; or another thread is in a call with
 it); EBADF.
 Thread: any. Constant time where it is refused. Calls of other threads with the arena are not
 refused for it: they wait while it is decided, and are EBADF if it has ended. Since 0.2.
 */
int pf_arena_destroy(struct pf_arena_t *arena);

/*
 Allocates memory of an arena: whole pages of 4096 bytes, zeroed, contiguous for the device.

 @arena: the arena.
 @len: bytes, at least 1; rounded up to pages.
 @iova: where its address for the devices of the arena's first domain is stored (0 unless
 PF_POLICY_WHOLE); NULL: not needed.

 Return: the address; or NULL, and errno: ENOMEM (the message says how much is in use); EINVAL
 (0 bytes); EBADF.
 Thread: any. Allocates where it is refused: its message. Ownership: the caller's, until
 pf_free(). Since 0.2.

 */
void *pf_alloc(struct pf_arena_t *arena, size_t len, uint64_t *iova) PF_CHECKED;

/*
 Frees memory of pf_alloc() or of pf_frames_fill().

 @arena: the arena that allocated it.
 @va: its address, as it was returned; NULL does nothing.

 Return: 0, or -errno: EINVAL (it is not allocated: freed before, or never; or it is inside an
 allocation, or of another arena); EBUSY (a mapping or a request uses it). Nothing has changed
 then. EBADF.
 Thread: any. Allocates where it is refused: its message. Since 0.2.
 */
int pf_free(struct pf_arena_t *arena, void *va);

/*
 Returns the address of memory for the devices of a domain, as vtophys functions do.

 @domain: the domain.
 @va: memory that is mapped there as a whole: of an arena of PF_POLICY_WHOLE, or registered. A
 block or a page of another arena's pool has its address beside it.
 @len: bytes that the caller needs, all of which are mapped there in one piece.
 @iova: where the address is stored.

 Return: 0, or -errno: ENXIO (it is not in this domain, or not mapped as a whole); EINVAL (not
 allocated, or not `len` bytes of it); EFAULT; EBADF.
 Thread: any. Since 0.2.

 */
int pf_iova(struct pf_domain_t *domain, const void *va, size_t len, uint64_t *iova) PF_CHECKED;

/*
 Describes an arena's memory, for a program that shares it by its file descriptor.

 Another mapping of the file has addresses of its own, which the library treats as other memory:
 a program that registers them guarantees that memory freed by the arena is not in use.

 @arena: the arena.
 @region: where the description is stored; its `struct_size` is set before.

 Return: 0, or -errno: EINVAL (`struct_size`); EMFILE; EFAULT; EBADF.
 Thread: any. Since 0.2.

 */
int pf_arena_region(struct pf_arena_t *arena, struct pf_region *region) PF_CHECKED;

/*
 Creates one thread's cache of a pool: allocating and freeing through it takes no lock, as long
 as it has blocks.

 @pool: the pool.
 @out: where the handle is stored.

 Return: 0, or -errno: EBADF; EFAULT; ENFILE.
 Thread: any; then one thread at a time uses the cache. Allocates. Ends with pf_cache_destroy().
 Since 0.2.

 */
int pf_pool_cache(struct pf_pool_t *pool, struct pf_cache_t **out) PF_CHECKED;

/*
 Ends a cache: its free blocks go back to the pool. Blocks that were allocated through it stay
 allocated; any cache of the pool frees them.

 @cache: the cache; NULL does nothing.

 Return: 0, or -errno: EBADF; EBUSY (another thread is in a call with it).
 Thread: any. Since 0.2.
 */
int pf_cache_destroy(struct pf_cache_t *cache);

/*
 Allocates a block. It holds the last user's content.

 @cache: the cache.
 @block: where the addresses and the length are stored; its tag stays.

 Return: 0, or -errno: ENOMEM (the pool has no free block and no more memory: the message says
 which limit); EFAULT; EBADF; EBUSY (another thread is in a call with the cache).
 Thread: the cache's. Allocates when the pool takes more memory (ENOMEM without the byte for the
 state of each block), when blocks are allocated for the first time, and where it is refused: its
 message. Ownership: the caller's, until pf_put(). Since 0.2.

 */
int pf_get(struct pf_cache_t *cache, struct pf_block_t *block) PF_CHECKED;

/*
 Frees a block, whichever cache of the pool allocated it.

 @cache: a cache of the block's pool.
 @block: the block: its two addresses as they were returned.

 Return: 0, or -errno: EINVAL (it is free already, of another pool, not where a block begins, or
 its addresses do not belong together); EBUSY (a mapping or a request uses a page of the arena
 that is the block's alone: not seen of blocks that share their pages; or another thread is in a
 call with the cache); nothing has changed then. EFAULT; EBADF.
 Thread: the cache's. Allocates where it is refused: its message. Since 0.2.

 */
int pf_put(struct pf_cache_t *cache, const struct pf_block_t *block);

/*
 Allocates `n` blocks, all or none.

 @cache: the cache.
 @blocks: where they are stored: addresses and lengths; the tags stay.
 @n: how many.

 Return: 0; or -errno: ENOMEM (the message says how many there are), and each `va` is NULL then;
 EFAULT; EBADF; EBUSY (another thread is in a call with the cache).
 Thread: the cache's. Allocates as pf_get(). Ownership: the caller's, until pf_put() or
 pf_put_bulk(). Since 0.2.

 */
int pf_get_bulk(struct pf_cache_t *cache, struct pf_block_t *blocks, unsigned int n) PF_CHECKED;

/*
 Frees `n` blocks, whichever caches of the pool allocated them, until one is refused.

 @cache: a cache of the blocks' pool.
 @blocks: the blocks.
 @n: how many.
 @bad: where the index of the block is stored that was refused; NULL: not needed.

 Return: 0; or -errno: EINVAL or EBUSY, as for pf_put(): those before `*bad` are freed, it and
 those behind it are as before. EFAULT; EBADF.
 Thread: the cache's. Allocates where it is refused: its message. Since 0.2.

 */
int pf_put_bulk(struct pf_cache_t *cache,
                const struct pf_block_t *blocks,
                unsigned int n,
                unsigned int *bad);

/*
 Opens a PCI device for a driver of the program's own. It must be bound to vfio-pci (`pinfold
 bind`). It reaches memory when pf_device_bus_master() has allowed it, and then only memory
 mapped in the domain.

 @domain: a domain of pf_domain_create(), in which it is opened; or one to which it is attached
 (pf_domain_vfio(), pf_domain_attach()).
 @bdf: the device's address, as "0000:01:00.0"; or another form of it.
 @out: where the handle is stored.

 Return: 0, or -errno: ENODEV, EACCES and errors of the kernel; EBUSY (it is open already, or
 attached to another domain of the process); ENOTSUP (a software domain); EINVAL (`bdf`); EBADF; EFAULT; ENFILE. The message names the step
 that is missing.
 Thread: any. Allocates. Ends with pf_device_destroy(). Since 0.2.

 */
int pf_device_open(struct pf_domain_t *domain,
                   const char *bdf,
                   struct pf_device_t **out) PF_CHECKED;

/*
 Ends a driver: the device no longer reaches memory, its interrupts are disabled and their
 descriptors closed, and its registers are unmapped. Unless it is attached to its domain
 otherwise, it is closed, and the kernel resets it.

 @device: the device; NULL does nothing.

 Return: 0, or -errno: EBUSY (another thread is in a call with it); EBADF.
 Thread: any. No thread uses its registers any more. Since 0.2.
 */
int pf_device_destroy(struct pf_device_t *device);

/*
 Maps the registers of a device. pf_read32(), pf_write32() and the like access them.

 @device: the device.
 @index: the BAR, 0 to 5.
 @bar: where address and length are stored; each call stores the same.

 Return: 0, or -errno: ENXIO (the device has no such BAR); ENOTSUP (the kernel does not let all
 of it be mapped: I/O ports); EFAULT; EBADF; errors of the kernel.
 Thread: any. Takes a lock. Allocates the first time for each. Ownership: the registers stay
 mapped until pf_device_destroy(). While the device does not decode its memory (bit 1 of the
 command register), an access is a SIGBUS. Since 0.2.

 */
int pf_device_bar(struct pf_device_t *device, unsigned int index, struct pf_bar *bar) PF_CHECKED;

/*
 Reads configuration space. 1, 2 or 4 bytes at a multiple of that are one access.

 @device: the device.
 @offset: where.
 @buf: where the bytes are stored.
 @len: how many.

 Return: 0, or -errno: EINVAL (beyond the end); EFAULT; EBADF; errors of the kernel.
 Thread: any. Since 0.2.

 */
int pf_device_config_read(struct pf_device_t *device, uint64_t offset, void *buf, size_t len) PF_CHECKED;

/*
 Writes configuration space, as pf_device_config_read() reads it. The kernel filters what would
 endanger other devices.

 @device: the device.
 @offset: where.
 @buf: the bytes.
 @len: how many.

 Return: as pf_device_config_read().
 Thread: any. Since 0.2.

 */
int pf_device_config_write(struct pf_device_t *device,
                           uint64_t offset,
                           const void *buf,
                           size_t len) PF_CHECKED;

/*
 Enables the first `n` interrupts of a device (MSI-X, or MSI if it has none), each with an
 eventfd: readable when it was raised. A read() of 8 bytes returns how often, and resets it; it
 does not block. All that are used are enabled by one call.

 @device: the device.
 @n: how many; 0 disables all, and closes their descriptors.
 @fds: where the `n` descriptors are stored, the first that of interrupt 0.

 Return: how many interrupts the device has; or -errno: EINVAL (it has fewer than `n`); EBUSY
 (some are enabled: disable them first); EFAULT; EBADF; errors of the kernel. Nothing has
 changed then.
 Thread: any. Takes a lock. Allocates the first time. Ownership: the descriptors are the
 device's: read them, and do not close them. Each is two of the process's. Since 0.2.

 */
int pf_device_irqs(struct pf_device_t *device, unsigned int n, int *fds) PF_CHECKED;

/*
 Lets a device access memory, or no longer. Its registers are decoded from the first time on.

 @device: the device.
 @on: 1 or 0.

 Return: 0, or -errno: EINVAL (`on`); EBADF; errors of the kernel.
 Thread: any. Since 0.2.
 */
int pf_device_bus_master(struct pf_device_t *device, unsigned int on) PF_CHECKED;

/*
 Resets a device: it has lost its state, and accesses no memory until it is set up again. A loop
 of requests learns this by pf_requests_stopped(). The kernel's setup is as before: bus mastering
 is on if it was, the registers stay mapped, and the interrupts enabled, with the same
 descriptors.

 @device: the device.

 Return: 0, or -errno: ENOTSUP (it cannot be reset alone); EBADF; errors of the kernel.
 Thread: any. Since 0.2.
 */
int pf_device_reset(struct pf_device_t *device) PF_CHECKED;

/*
 Creates a domain behind a software IOMMU: for tests, and for a program that has no hardware. The
 devices in it are models: of a controller (pf_nvme_open() without `bdf`), or the program's own
 (pf_port_open()). Their accesses are checked as by a real IOMMU.

 @out: where the handle is stored.

 Return: 0, or -errno: ENOMEM; EFAULT (`out` is NULL); ENFILE (65,536 domains exist).
 Thread: any. Allocates. Ends with pf_domain_destroy(). Since 0.2.

 */
int pf_domain_soft(struct pf_domain_t **out) PF_CHECKED;

/*
 Creates a domain as pf_domain_soft() does, whose IOMMU is slow or goes wrong.

 @opts: the options; NULL: the defaults.
 @out: where the handle is stored.

 Return: 0, or -errno: ENOMEM; EINVAL (`struct_size`); E2BIG (fields of a newer version); EFAULT
 (`out` is NULL); ENFILE (65,536 domains exist).
 Thread: any. Allocates. Ends with pf_domain_destroy(). Since 0.2.

 */
int pf_domain_soft_with(const struct pf_domain_soft_opts *opts, struct pf_domain_t **out) PF_CHECKED;

/*
 Opens a PCI device through VFIO, and creates the domain that it is in.

 @bdf: the device's address, as "0000:01:00.0". It must be bound to vfio-pci (`pinfold bind`).
 @iommu: the kernel's interface: PF_IOMMU_*; 0: PF_IOMMU_BEST.
 @out: where the handle is stored.

 Return: 0, or -errno: ENODEV, EACCES, ENOTSUP and errors of the kernel; EBUSY (this process has
 it already: in another domain, or by pf_device_open()); EINVAL (`bdf`, or an unknown `iommu`);
 EFAULT. The message names the step that is missing.
 Thread: any. Allocates. Ends with pf_domain_destroy(), after which the device is reset. Since
 0.2.

 */
int pf_domain_vfio(const char *bdf, uint32_t iommu, struct pf_domain_t **out) PF_CHECKED;

/*
 Creates a domain for real devices before there is one in it: pf_device_open() and
 pf_domain_attach() add devices, which all reach the same memory at the same addresses. Memory
 may be mapped before: the first device finds it. With type 1 it is pinned only then, and where
 that fails the device is not added.

 Or imports an address space of the program's own (`ioas`), with devices in it or without. What
 is mapped through the domain is unmapped when the object that it belongs to ends; the address
 space, its devices and what else is mapped there stay, and the descriptor stays open. Until then
 the program does not copy such mappings to another address space (IOMMU_IOAS_COPY): they could
 not be revoked there. If another process has the iommufd too, end the objects before the process
 ends.

 @opts: the options; NULL: the defaults.
 @out: where the handle is stored.

 Return: 0, or -errno: EACCES, ENOENT (also: no such `ioas`), ENOTSUP and what the kernel
 returns; ENOTTY (`iommufd` is none); EBADF (it is not open); EINVAL (an unknown `iommu`;
 addresses that are not whole pages, not usable, or without `ioas`; `reserved`, `struct_size`);
 E2BIG (fields of a newer version); EFAULT; ENFILE. The message names the step that is missing.
 Thread: any. Allocates. Ends with pf_domain_destroy(). Since 0.2.

 */
int pf_domain_create(const struct pf_domain_opts *opts, struct pf_domain_t **out) PF_CHECKED;

/*
 Attaches a device to a domain of pf_domain_vfio() or pf_domain_create(): all of its devices
 reach the same memory at the same addresses.

 @domain: the domain.
 @bdf: the device's address.

 Return: 0, or -errno: as pf_domain_vfio(); EEXIST (it is attached to this domain); ENOTSUP (a
 software domain).
 Thread: any. Allocates. Since 0.2.

 */
int pf_domain_attach(struct pf_domain_t *domain, const char *bdf) PF_CHECKED;

/*
 Detaches a device from its domain: it is reset, and reaches nothing any more. Its driver ends
 first. With type 1 its group is closed with its last device in the domain, so that other programs
 can open it; the last group of a domain only when nothing is mapped there any more.

 @domain: the domain.
 @bdf: the device's address.

 Return: 0, or -errno: ENODEV (it is not attached); EBUSY (pf_device_open() or pf_nvme_open() has
 it, and nothing has changed: end that first); EBADF; EINVAL; EFAULT.
 Thread: any. Since 0.2.

 */
int pf_domain_detach(struct pf_domain_t *domain, const char *bdf) PF_CHECKED;

/*
 Destroys a domain's handle. Objects created in the domain keep it: owners, arenas,
 registrations, controllers.

 @domain: the domain; NULL does nothing.

 Return: 0, or -errno: EBADF; EBUSY (another thread is in a call with it).
 Thread: any. Since 0.2.
 */
int pf_domain_destroy(struct pf_domain_t *domain);

/*
 Returns the message of the last failed call of this thread: a sentence with the value, the limit
 and the next step. The empty string if none has failed; also in handlers that run at the end of
 the thread or of the process (pthread_key_create(), atexit()).

 The text is in a buffer of the thread, at the same address as long as the thread exists; the
 next call of the library in this thread that fails changes it. At most 2047 bytes.

 Thread: any; the message is the thread's own. Since 0.2.
 */
const char *pf_strerror_last(void);

/*
 Creates one thread's handle of an arena, for allocating and freeing frames of 4096 bytes without
 a lock. It caches frames, which go back when it ends or the arena runs short.

 @arena: the arena.
 @out: where the handle is stored.

 Return: 0, or -errno: EBADF; EFAULT; ENFILE.
 Thread: any; then one thread at a time uses the handle. Allocates. Ends with
 pf_frames_destroy(), and the arena not before. Since 0.2.

 */
int pf_frames_create(struct pf_arena_t *arena, struct pf_frames_t **out) PF_CHECKED;

/*
 Ends a handle. Frames that were allocated through it stay allocated: pf_free() or another handle
 of the arena frees them.

 @frames: the handle; NULL does nothing.

 Return: 0, or -errno: EBADF; EBUSY (another thread is in a call with it).
 Thread: any. Since 0.2.
 */
int pf_frames_destroy(struct pf_frames_t *frames);

/*
 Allocates a frame for each slot that is NULL, until the arena runs short. Slots that are not
 NULL stay as they are. The content is what the last user left.

 In an arena of 64 MiB or more, a call stops before the last 1/800 (at most 80 MiB) of it, which
 is for pf_alloc(); but it allocates one frame, while there is one.

 @frames: the handle.
 @slots: the slots.
 @n: how many; at most INT_MAX.

 Return: how many slots are full now; or -errno: EINVAL (`n`); EFAULT; EBADF; EBUSY (another
 thread is in a call with the handle).
 Thread: the handle's. Ownership: the caller's, until pf_frames_free() or pf_free(). Since 0.2.

 */
int pf_frames_fill(struct pf_frames_t *frames, void **slots, unsigned int n) PF_CHECKED;

/*
 Allocates `n` frames and links them: the first word of each is the address of the next, NULL in
 the last. Fewer if the arena runs short.

 @frames: the handle.
 @n: how many; at most INT_MAX.
 @head: where the address of the first is stored: NULL if there is none.

 Return: how many there are; or -errno, as for pf_frames_fill().
 Thread: the handle's. Ownership: the caller's, each until pf_frames_free() or pf_free(). Since
 0.2.

 */
int pf_frames_list(struct pf_frames_t *frames, unsigned int n, void **head) PF_CHECKED;

/*
 Frees the memory in each slot that is not NULL, and makes the slot NULL, until one is refused.

 @frames: a handle of the memory's arena.
 @slots: memory of pf_frames_fill(), pf_frames_list() or pf_alloc(), of any handle.
 @n: how many; at most INT_MAX.

 Return: 0, or -errno: EINVAL (it is not allocated: freed before, or never; or it is inside an
 allocation, or of another arena); EBUSY (a mapping or a request uses it, or another thread is in
 a call with the handle). The message has the index of the slot, which stays with those behind
 it. EFAULT; EBADF.
 Thread: the handle's. Allocates where it is refused: its message. Since 0.2.

 */
int pf_frames_free(struct pf_frames_t *frames, void **slots, unsigned int n);

/*
 Maps memory for a device: until it is revoked, the device reaches it, in this direction, at the
 address that is stored. pf_free() of it is EBUSY until then.

 A device reaches the whole pages of 4096 bytes around it. Memory of PF_POLICY_WHOLE, and
 registered memory, is mapped for its lifetime: of such memory a mapping costs next to nothing,
 and its end does not keep the device from the memory: it returns PF_STAYS_MAPPED. Memory of
 pools in an arena of PF_POLICY_PER_USE stays mapped too, at the addresses in its blocks and
 pages, and is refused here.

 @owner: the owner, of the memory's domain.
 @va: the memory: any bytes of one allocation of an arena in the domain, or of registered memory.
 @len: bytes, at least 1.
 @dir: enum pf_dir: the access of the device.
 @map: where the mapping's name is stored, for pf_unmap() or pf_revoke_many() of this owner.
 @iova: where the device's address of `va` is stored.

 Return: 0, or -errno: ENXIO (not in this domain's memory); EINVAL (not allocated, not `len`
 bytes of it, 0 bytes, a pool's that stays mapped, or no direction); ENOMEM, ENOSPC (the domain's
 limits, or no address left); EIO, ETIMEDOUT (the IOMMU); EFAULT; EBADF; EBUSY (another thread is
 in a call with the owner). Nothing is mapped then.
 Thread: the owner's; no lock is taken that other owners take. Allocates when the owner has more
 mappings than ever. Since 0.2.

 */
int pf_map(struct pf_owner_t *owner,
           void *va,
           size_t len,
           unsigned int dir,
           struct pf_map_t *map,
           uint64_t *iova) PF_CHECKED;

/*
 Maps many pieces of memory, all or none. Up to 1 MiB altogether, with the rest of their pages,
 they have consecutive addresses where the domain has room, so that a device may take them as
 one.

 @owner: the owner, of the memory's domain.
 @iov: the pieces, each as for pf_map().
 @n: how many; 0 does nothing.
 @dir: enum pf_dir: the access of the device to all of them.
 @maps: where the `n` names are stored.
 @iovas: where the `n` addresses are stored.

 Return: 0, or -errno: as pf_map(); the message names the index of the piece; ENOMEM also where
 there is no memory for some 200 bytes for each piece. Nothing is mapped then, and nothing is
 stored.
 Thread: the owner's, as for pf_map(). Allocates. Since 0.2.

 */
int pf_map_many(struct pf_owner_t *owner,
                const struct iovec *iov,
                unsigned int n,
                unsigned int dir,
                struct pf_map_t *maps,
                uint64_t *iovas) PF_CHECKED;

/*
 Ends a mapping: revokes the device's access, and waits until it cannot reach the memory.

 @owner: the owner that made the mapping.
 @map: its name. It names nothing from then on, also after EIO and ETIMEDOUT.

 Other mappings and requests of the memory, or of its pages of 4096 bytes, still let devices reach
 it until they have ended.

 Return: 0: no device reaches the memory by this mapping; PF_STAYS_MAPPED: the mapping has ended,
 and devices still reach the memory, as it is mapped for its lifetime; or -errno: ESTALE (it has
 ended before, or is another owner's: nothing has changed); ETIMEDOUT (the flush is past its
 deadline: the memory stays in use until it completes, see pf_quarantine(); pf_revoke_many()
 keeps a ticket to wait with); EIO (it never completes: the memory is quarantined, and pf_free()
 of it stays EBUSY); EBADF; EBUSY (another thread is in a call with the owner).
 Thread: the owner's. May allocate in a software domain. Since 0.2.
 */
int pf_unmap(struct pf_owner_t *owner, struct pf_map_t map) PF_CHECKED;

/*
 Revokes a device's access to many mappings, with one flush, and does not wait for it: until the
 ticket has completed the device may still reach the memory, which stays in use.

 @owner: the owner that made the mappings.
 @maps: their names, which name nothing from then on.
 @n: how many. With 0 the ticket has completed.
 @ticket: where the ticket is stored, for pf_quiesced() and pf_wait() of this owner: one of them
 hands the memory back.

 Return: 0; PF_STAYS_MAPPED: devices reach the memory of at least one of them also when the
 ticket has completed, as it is mapped for its lifetime; or -errno: ESTALE (one has ended before,
 is another owner's, or is there twice: the message names its index, and nothing is revoked);
 ENOMEM (nothing is revoked); EFAULT; EBADF; EBUSY (another thread is in a call with the owner).
 Thread: the owner's. Allocates when more tickets are pending than ever, or one has more
 mappings. Since 0.2.

 */
int pf_revoke_many(struct pf_owner_t *owner,
                   const struct pf_map_t *maps,
                   unsigned int n,
                   struct pf_ticket_t *ticket) PF_CHECKED;

/*
 Describes the memory of a domain that is held because a device may still reach it. Memory whose
 late flush has completed meanwhile is handed back first. For a controller that the library
 drives, the controller's counters have the memory of lost requests (pf_stats(): `quarantined`).

 @domain: the domain.
 @held: where the counts are stored; its `struct_size` is set before. NULL: not needed.
 @why: where a sentence is stored, with its end (NUL), cut off to fit; NULL: not needed.
 @why_len: the bytes of `why`.

 Return: the length of the whole sentence without its end, or -errno: EINVAL (`struct_size`);
 EBADF.
 Thread: any. Takes locks. Allocates. Since 0.2.

 */
int pf_quarantine(struct pf_domain_t *domain, struct pf_held *held, char *why, size_t why_len) PF_CHECKED;

/*
 Opens an NVMe controller: resets it, enables it, and finds its namespaces.

 @domain: the domain that the controller is in.
 @arena: memory for its rings and lists, of this domain; pf_arena_destroy() refuses it until
 pf_nvme_destroy(). 2 MiB are enough for a queue of 32; where it lacks memory for lists, requests
 wait for each other.
 @opts: the options: `bdf`, or a model's `path` or `size`.
 @out: where the handle is stored.

 Return: 0, or -errno: EINVAL (a model without a size, or of an unsupported block or size;
 unknown flags); ENODEV (`bdf` is not attached to the domain, or not there); EBUSY (a controller
 is open on it); ENOTSUP (a model in a device's domain; not an NVMe controller, or one that lacks
 what is needed); ENXIO (the arena is not in this domain); ENOMEM; EIO or ETIMEDOUT (the
 controller does not answer as it should); errors of the file; E2BIG; EBADF; EFAULT; ENFILE.
 Thread: any. It blocks until the controller answers. Allocates. Ends with pf_nvme_destroy().
 Since 0.2.

 */
int pf_nvme_open(struct pf_domain_t *domain,
                 struct pf_arena_t *arena,
                 const struct pf_nvme_opts *opts,
                 struct pf_nvme_t **out) PF_CHECKED;

/*
 Shuts a controller down and ends its handle. Memory of requests that were given up (PF_LOST) is
 no longer in use after that.

 @nvme: the controller; NULL does nothing.

 Return: 0, or -errno: EBUSY (it has queues); EBADF. EIO, ENODEV or ETIMEDOUT: the controller
 could not be disabled; the handle has ended nevertheless, and what the controller may still
 reach stays in use for good: its rings, and the memory of requests that were given up.
 Thread: any. It blocks until the controller has written back what it caches, at most a minute.
 Since 0.2.
 */
int pf_nvme_destroy(struct pf_nvme_t *nvme);

/*
 Returns the capabilities of a controller and one of its namespaces.

 @nvme: the controller.
 @nsid: the namespace's number, from 1; 0: the first.
 @info: where it is stored; the caller sets `struct_size`.

 Return: 0, or -errno: ENODEV (no such namespace, or one that is not supported: the message says
 why); EINVAL (`struct_size`); EFAULT; EBADF.
 Thread: any. Allocates. Since 0.2.

 */
int pf_nvme_info(struct pf_nvme_t *nvme, uint32_t nsid, struct pf_nvme_info *info) PF_CHECKED;

/*
 Creates a thread's handle of a domain, for its mappings: no lock, and addresses of its own.

 @domain: the domain.
 @out: where the handle is stored.

 Return: 0, or -errno: EBADF; EFAULT (`out` is NULL); ENFILE (65,536 owners exist).
 Thread: any. An owner is used by one thread at a time: a call beside another's gives EBUSY.
 Ownership: it keeps the domain. Allocates. Ends with pf_owner_destroy(). Since 0.2.

 */
int pf_owner_create(struct pf_domain_t *domain, struct pf_owner_t **out) PF_CHECKED;

/*
 Destroys an owner. Memory of tickets that have completed is handed back; quarantined memory
 stays so. The descriptor of pf_quiesce_fd() is closed.

 @owner: the owner; NULL does nothing.

 Return: 0, or -errno: EBUSY (mappings are live or tickets have not completed, and the message
 counts them; or another thread is in a call with it); EBADF.
 Thread: any. Since 0.2.
 */
int pf_owner_destroy(struct pf_owner_t *owner);

/*
 Returns whether no device can reach the memory of a ticket any more, and then hands it back: it
 can be read as the device left it, mapped again, and freed. Never waits.

 @owner: the owner that revoked the mappings.
 @ticket: what pf_revoke_many() stored. One that was handed back before stays 1.

 Return: 1; 0: not yet; or -errno: ETIMEDOUT (the flush is past its deadline; it may still
 complete, so ask again or call pf_wait()); EIO (it never completes: the memory is quarantined,
 see pf_quarantine(); pf_free() of it stays EBUSY); ESTALE (no ticket of this owner); EBADF;
 EBUSY (another thread is in a call with the owner).
 Thread: the owner's. May allocate in a software domain. Since 0.2.
 */
int pf_quiesced(struct pf_owner_t *owner, struct pf_ticket_t ticket) PF_CHECKED;

/*
 Waits until no device can reach the memory of a ticket, and hands it back.

 @owner: the owner that revoked the mappings.
 @ticket: what pf_revoke_many() stored. One that was handed back before needs no wait.
 @ns: the longest wait in nanoseconds; UINT64_MAX: as long as it takes.

 Return: 0, or -errno: ETIMEDOUT (the memory stays in use: call again); EIO (the flush never
 completes: the memory is quarantined, see pf_quarantine(); pf_free() of it stays EBUSY); ESTALE
 (no ticket of this owner); EBADF; EBUSY (another thread is in a call with the owner).
 Thread: the owner's. May allocate in a software domain. Since 0.2.
 */
int pf_wait(struct pf_owner_t *owner, struct pf_ticket_t ticket, uint64_t ns) PF_CHECKED;

/*
 Returns an eventfd that becomes readable when a ticket of this owner has completed, failed, or
 passed its deadline: for a program's own event loop. Nothing polls meanwhile.

 When it is readable, read its 8 bytes and then ask pf_quiesced() about the oldest tickets, until
 one is not 1. It may be readable although nothing has completed. A ticket that was ETIMEDOUT is
 announced again when its flush completes or fails.

 @owner: the owner.

 Return: the file descriptor, each time the same, non-blocking; or -errno: EMFILE, ENFILE, EBADF,
 EBUSY (another thread is in a call with the owner).
 Thread: the owner's; the descriptor may be polled by any. Allocates the first time. Ownership:
 the owner's, which closes it. Since 0.2.
 */
int pf_quiesce_fd(struct pf_owner_t *owner) PF_CHECKED;

/*
 Creates a pool of pages for a receive path: the devices of the arena's first domain read and
 write a page from when it is first allocated on, also while it is free.

 @arena: the source of its memory, which is taken as needed.
 @page_bytes: 4096 times a power of two, up to 2 MiB.
 @ring: how many pages other threads can return before the consumer takes them, a power of two up
 to 1,048,576; 0: 1024. More are returned all the same, by a slower way.
 @out: where the handle is stored.

 Return: 0, or -errno: EINVAL (`page_bytes`, `ring`); ENOMEM (8 bytes for each page of the ring,
 and for each 2 MiB of the arena); EBADF; EFAULT; ENFILE.
 Thread: any. Allocates. Ends with pf_pages_destroy(), and the arena not before. Since 0.2.

 */
int pf_pages_create(struct pf_arena_t *arena,
                    unsigned int page_bytes,
                    unsigned int ring,
                    struct pf_pages_t **out) PF_CHECKED;

/*
 Ends a pool of pages: its memory goes back to the arena.

 @pages: the pool; NULL does nothing.

 Return: 0, or -errno: EBUSY (pages are in use: the message says how many; a mapping or a request
 uses one; or another thread is in a call with it); EBADF. The pool is as before then.
 Thread: any. Takes time proportional to the chunks, and to the pages where a mapping or a request
 uses memory of the arena's pools. Calls of other threads with the pool are not refused for it.
 Since 0.2.
 */
int pf_pages_destroy(struct pf_pages_t *pages);

/*
 Allocates a page for each slot whose `va` is NULL, until pages run out. Other slots stay as they
 are. The content is what the last user left.

 @pages: the pool.
 @slots: the slots; their tags stay.
 @n: how many; at most INT_MAX.

 Return: how many slots are full now; or -errno: EINVAL (`n`); EFAULT; EBADF; EBUSY (another
 thread is the pool's consumer in a call).
 Thread: the consumer's. Allocates when the pool takes more memory: 16 bytes for each page,
 without which it takes none. Ownership: the caller's, until pf_pages_recycle() or
 pf_pages_return(). Since 0.2.

 */
int pf_pages_fill(struct pf_pages_t *pages, struct pf_block_t *slots, unsigned int n) PF_CHECKED;

/*
 Returns pages to the pool, on the consumer's thread: the fast way.

 @pages: the pool.
 @blocks: the pages: the two addresses as they were returned. `va` NULL is skipped.
 @n: how many.
 @bad: where the index of the page is stored that was refused; NULL: not needed.

 Return: 0; or -errno: EINVAL (it is free already, of another pool, not where a page begins, or
 its addresses do not belong together) or EBUSY (a mapping or a request uses it): those before
 `*bad` are returned, it and those behind it are as before. EBUSY without `*bad` where another
 thread is the pool's consumer in a call. EFAULT; EBADF.
 Thread: the consumer's. Allocates where it is refused: its message. Since 0.2.

 */
int pf_pages_recycle(struct pf_pages_t *pages,
                     const struct pf_block_t *blocks,
                     unsigned int n,
                     unsigned int *bad) PF_CHECKED;

/*
 Returns pages to the pool, on any thread, also while the consumer is in a call.

 @pages: the pool.
 @blocks: the pages: the two addresses as they were returned. `va` NULL is skipped.
 @n: how many.
 @bad: where the index of the page is stored that was refused; NULL: not needed.

 Return: 0, or -errno as for pf_pages_recycle(), but EBUSY only with `*bad`. One misuse is not
 reported: two threads that return one page in the same instant. It is returned once.
 Thread: any. Allocates where it is refused: its message. The event of the return may come after
 that of the page's next use. Since 0.2.

 */
int pf_pages_return(struct pf_pages_t *pages,
                    const struct pf_block_t *blocks,
                    unsigned int n,
                    unsigned int *bad) PF_CHECKED;

/*
 Creates a pool of blocks of one size. Devices of the arena's first domain reach its memory, for
 reading and writing, for as long as the pool has it, also with PF_POLICY_PER_USE.

 @arena: the source of its memory, which is taken as needed; NULL: only from pf_pool_add().
 @opts: the options; `size` at least.
 @out: where the handle is stored.

 Return: 0, or -errno: EINVAL (size, align, boundary, limits, unknown flags, or a minimum without
 an arena: the message has the value and its limit); ENOMEM (the arena has less than the minimum;
 or there is no memory for the state of its blocks, a byte each, or for 8 bytes for each 2 MiB of
 the arena); E2BIG (fields of a newer version); EBADF; EFAULT; ENFILE.
 Thread: any. Allocates. Ends with pf_pool_destroy(), and the arena not before. Since 0.2.

 */
int pf_pool_create(struct pf_arena_t *arena,
                   const struct pf_pool_opts *opts,
                   struct pf_pool_t **out) PF_CHECKED;

/*
 Adds memory of the caller to a pool, in any number of pieces: the way to have a pool in memory
 that is mapped for the device already.

 Blocks follow one another from `va` at a distance of pf_pool_stats.block_bytes, which is the
 size of the options if that is a multiple of `align`, and at least 16. In each 2 MiB from `va`
 on (1 GiB if a block is larger than 2 MiB) there are as many as fit, so that a piece of `len`
 bytes has `len / block_bytes` blocks if `len` is at most 2 MiB, or the size divides 2 MiB; and
 one less for each 2 MiB at most otherwise.

 @pool: the pool.
 @va: the memory. A multiple of the pool's `align`, and of its `boundary` (or of 2 MiB, if that
 is less); not of 4096. It may be in one allocation of an arena, or in registered memory, which
 is in use until the pool has ended; else in none of these, in any domain. Its pages are faulted
 in, and no other attribute of theirs is changed.
 @len: bytes, of at least one block. The rest behind the last block stays unused.
 @iova: its address for the device, aligned as `va`; what follows is linear. The library passes
 it on, and does not map anything.

 Return: how many blocks were added; or -errno, and none was: EINVAL (alignment, no block fits,
 or the end is beyond 64 bits: the message has the values; or part of an arena that is not all
 allocated); EEXIST (part of it is in this pool or in another already, or it is only in part an
 arena's or registered); ENOSPC (the maximum, or the 32 bits that number the blocks, of which
 each piece takes those of whole 2 MiB: 32,767 pieces of blocks of 16 bytes at most); EFAULT (a
 page of it is not mapped, not readable and writable, beyond the end of its file, or has no
 hugepage left: the message has the first; or NULL); ENOMEM (for the state of its blocks, a byte
 each, and some 100 bytes for each 2 MiB); EBADF.
 Thread: any. Allocates; linear in the pages. Ownership: the pool's, until pf_pool_destroy() has
 returned 0. Since 0.2.

 */
int64_t pf_pool_add(struct pf_pool_t *pool, void *va, size_t len, uint64_t iova) PF_CHECKED;

/*
 Returns a pool's counters. O(blocks).

 @pool: the pool.
 @stats: where they are stored; its `struct_size` is set before.

 Return: 0, or -errno: EINVAL (`struct_size`); EFAULT; EBADF.
 Thread: any. Allocates. Since 0.2.

 */
int pf_pool_stats(struct pf_pool_t *pool, struct pf_pool_stats *stats);

/*
 Writes the pool's report, in the format of the kernel's `pools` file: a line "poolinfo - 0.1",
 then one of name, blocks in use, all blocks, bytes of a block, chunks.

 @pool: the pool.
 @text: where it is written, with a NUL at its end; NULL with `size` 0: only the length is
 needed.
 @size: bytes of `text`; what does not fit is left out.

 Return: the length of all of the report, without the NUL; or -errno: EFAULT; EBADF.
 Thread: any. Allocates. Since 0.2.

 */
int pf_pool_report(struct pf_pool_t *pool, char *text, size_t size) PF_CHECKED;

/*
 Returns memory whose blocks are all free to the arena, as far as the minimum allows. Blocks in
 caches stay, and so does memory added with pf_pool_add(). Memory that a mapping or a request
 still uses is returned by a later call.

 @pool: the pool.

 Return: how many bytes; or -errno: EBADF.
 Thread: any. Takes time proportional to the blocks. Allocates some 80 bytes for each chunk that
 is free; one for which there is no memory is returned by a later call. Since 0.2.
 */
int64_t pf_pool_shrink(struct pf_pool_t *pool) PF_CHECKED;

/*
 Destroys a pool: its memory returns to the arena, and memory added to it is the caller's again.

 @pool: the pool; NULL does nothing.

 Return: 0, or -errno: EBUSY (blocks are allocated, caches exist, or a mapping or a request uses
 memory of the arena that the pool has: the message says how many; or another thread is in a call
 with it); EBADF. The pool is as before then.
 Thread: any. Takes time proportional to the blocks. Calls of other threads with the pool and its
 caches are not refused for it, and caches keep their blocks. Since 0.2.
 */
int pf_pool_destroy(struct pf_pool_t *pool);

/*
 Connects a device model to a domain of pf_domain_soft(): accesses through the port are a
 device's, and the software IOMMU checks them. Each port is a device of its own, with a cache of
 translations, so that a model and a test of its revocations may each have one.

 @domain: the domain.
 @out: where the handle is stored.

 Return: 0, or -errno: ENOTSUP (the domain's devices are real); EBADF; EFAULT; ENFILE.
 Thread: any. Allocates. Ends with pf_port_destroy(). Since 0.2.

 */
int pf_port_open(struct pf_domain_t *domain, struct pf_port_t **out) PF_CHECKED;

/*
 Disconnects a device model.

 @port: the port; NULL does nothing.

 Return: 0, or -errno: EBUSY (another thread is in a call with it); EBADF.
 Thread: any. Since 0.2.
 */
int pf_port_destroy(struct pf_port_t *port);

/*
 Reads memory as a device does. 4 or 8 bytes at a multiple of that are read at once; what follows
 in this thread comes after the read.

 @port: the port.
 @iova: the device's address of the memory.
 @buf: where the bytes are stored; it may be memory of the domain itself.
 @len: how many; 0 does nothing.

 Return: 0, or -errno: EFAULT (the device may not read there: pf_port_fault() has the address and
 the reason, and the bytes of the pages before are stored; or `buf` is NULL, which counts no
 fault); EBADF.
 Thread: any. Since 0.2.

 */
int pf_port_read(struct pf_port_t *port, uint64_t iova, void *buf, size_t len) PF_CHECKED;

/*
 Writes memory as a device does. 4 or 8 bytes at a multiple of that are written at once; a thread
 that sees the write sees the earlier stores of this thread.

 @port: the port.
 @iova: the device's address of the memory.
 @buf: the bytes.
 @len: how many; 0 does nothing.

 Return: 0, or -errno: EFAULT (the device may not write there: pf_port_fault() has the address
 and the reason, and the pages before are written; or `buf` is NULL, which counts no fault);
 EBADF.
 Thread: any. Since 0.2.

 */
int pf_port_write(struct pf_port_t *port, uint64_t iova, const void *buf, size_t len) PF_CHECKED;

/*
 Tells which accesses of a port have faulted.

 @port: the port.
 @fault: where the number of faults and the last one are stored; its `struct_size` is set before.

 Return: 0, or -errno: EINVAL (`struct_size`); EFAULT; EBADF.
 Thread: any. Takes a lock. Since 0.2.

 */
int pf_port_fault(struct pf_port_t *port, struct pf_fault *fault) PF_CHECKED;

/*
 Creates a queue of a controller, for one thread at a time.

 @nvme: the controller.
 @opts: the options; `depth` at least.
 @out: where the handle is stored.

 Return: 0, or -errno: EINVAL (depth; unknown protection, flags or reserved fields); ENOSPC (no
 queue or no interrupt of the controller is left); ENOMEM (of its arena; or some 2 kB for each
 request of the depth); EIO, ETIMEDOUT (the controller refuses it, or does not answer); E2BIG;
 EBADF; EFAULT; ENFILE.
 Thread: any. Allocates. Ends with pf_queue_destroy(). Since 0.2.

 */
int pf_queue_create(struct pf_nvme_t *nvme,
                    const struct pf_queue_opts *opts,
                    struct pf_queue_t **out) PF_CHECKED;

/*
 Deletes a queue.

 @queue: the queue; NULL does nothing.

 Return: 0, or -errno: EBUSY (requests have not been reported yet: the message says how many; or
 another thread is in a call with it); EBADF.
 Thread: any, when no other is in a call with it. Since 0.2.
 */
int pf_queue_destroy(struct pf_queue_t *queue);

/*
 Submits requests, in their order, up to the first that is refused. Their memory is in use until
 they are reported: pf_free() refuses it meanwhile.

 @queue: the queue.
 @requests: the requests.
 @n: how many.

 Return: how many were accepted; or -errno if the first was refused: EAGAIN (as many are
 unreported as the queue is deep, or too many flushes are late); EINVAL (an offset or a length
 that is no multiple of the block, beyond the end of the namespace, or 0; more than the largest
 transfer; an unknown operation or flag; memory that is not allocated, or that the controller
 cannot be given: the message has the entry of `iov`; memory that is mapped as a whole, unless
 PF_PROTECT_STATIC); ENXIO (memory that is not in the domain, or not mapped as a whole for
 PF_PROTECT_STATIC); ENODEV (no such namespace); EACCES (a command that the library relies on:
 cancel); EOPNOTSUPP (the controller cannot discard); ESTALE (the namespace was formatted or
 detached); EIO (the controller has failed); ENOMEM or ENOSPC (mapping it, or describing it to
 the controller); EBADF; EFAULT; EBUSY (another thread is in a call with it).
 Thread: one at a time. Allocates for a request with several entries in `iov` (some 100 bytes for
 each, ENOMEM), for more segments than before (16 bytes each), and in a software domain.
 Ownership: the memory is lent until the report. Since 0.2.

 */
int pf_submit(struct pf_queue_t *queue, const struct pf_request *requests, uint32_t n) PF_CHECKED;

/*
 Reports requests that have completed and whose memory no device can reach any more (except with
 PF_PROTECT_STATIC). Revokes requests that are found completed.

 @queue: the queue.
 @completions: where the reports are stored.
 @max: how many fit.

 Return: how many were stored; or -errno: EFAULT; EBADF; EBUSY (another thread is in a call with
 it). An error of a request is its own `result`.
 Thread: one at a time. It waits for flushes with PF_PROTECT_STRICT, and for a controller that
 has failed to be disabled; else never. May allocate small amounts: in a software domain; for
 requests that are aborted, lost, or of a namespace that has changed; and when the controller
 fails. Ownership: the memory of what is reported is the caller's again, unless PF_LOST. Since
 0.2.

 */
int pf_complete(struct pf_queue_t *queue, struct pf_completion *completions, uint32_t max) PF_CHECKED;

/*
 Waits until a request can be reported: sleeps, for a queue with PF_QUEUE_INTERRUPT, else polls.

 @queue: the queue.
 @ns: nanoseconds to wait at most; 0: only looks once.

 Return: how many requests pf_complete() reports now; 0 when the time is over, and at once if
 none is outstanding (where late requests leave no room for another, when one of them has ended:
 then pf_submit() accepts one); or -errno: EBADF; EBUSY (another thread is in a call with it).
 Thread: one at a time. With PF_PROTECT_STRICT it waits for the flushes of what it finds, at most
 5 s, whatever `ns` is; as it does for a controller that has failed to be disabled. May allocate
 as pf_complete(). Since 0.2.
 */
int pf_queue_wait(struct pf_queue_t *queue, uint64_t ns) PF_CHECKED;

/*
 Returns a descriptor for poll() and epoll: readable when requests may be reported. From then on
 a pf_complete() that returns 0 clears it; so call that until it does, then wait for at most 100
 ms (a controller that is gone raises no interrupt), and call it again. The end of a flush makes
 it readable, too.

 @queue: a queue with PF_QUEUE_INTERRUPT.

 Return: the descriptor; or -errno: ENOTSUP (it has no interrupt); EMFILE, ENFILE; EBADF; EBUSY.
 Thread: one at a time. Allocates the first time. Ownership: the queue's: do not read, write or
 close it. Since 0.2.
 */
int pf_queue_fd(struct pf_queue_t *queue) PF_CHECKED;

/*
 Registers memory of the program with a domain: whole pages, of any origin. Until
 pf_reg_destroy() all of it is mapped there, for reading and writing, so that pf_iova(),
 pf_segments() and requests find it by its address.

 The pages are faulted in; no other attribute of theirs (mlock(), madvise()) is changed. Where
 they are hugepages, the addresses are such that leaves of 2 MiB or 1 GiB map them, also where
 the memory begins within one. A real device's mapping pins them, and RLIMIT_MEMLOCK is charged
 `len` bytes for each domain; the table of a ring is charged hugepages whole, once.

 Memory may be registered with several domains, by one call for each, always as the same bytes:
 it stays one memory of the program, which has it back when the last of the registrations has
 ended. What is part of an arena, or overlaps with other bytes that are registered, in any domain
 of the process, is refused: such bytes would have two owners, of which one could free them while
 the device of the other reaches them. pf_arena_map_into() shares an arena between domains.

 @domain: the domain.
 @va: the memory, at a multiple of 4096.
 @len: bytes, a multiple of 4096.
 @out: where the handle is stored.

 Return: 0, or -errno: EINVAL (no whole pages, or 0 bytes); EFAULT (a page is not mapped, not
 readable and writable, beyond the end of its file, or has no hugepage left: the message has the
 first; or `out` is NULL); EEXIST (it is registered in this domain, or part of it is an arena's
 or registered otherwise, in any domain: the message says what); ENOMEM, ENOSPC (RLIMIT_MEMLOCK,
 or the domain's limits); EIO (the IOMMU); EBADF; ENFILE. Nothing is registered then.
 Thread: any. Allocates; linear in the pages; waits for the handler of a userfaultfd. Ownership:
 the caller's, which keeps the memory mapped and of this process until pf_reg_destroy() has
 returned 0 for each registration of it. Since 0.2.

 */
int pf_register(struct pf_domain_t *domain, void *va, size_t len, struct pf_reg_t **out) PF_CHECKED;

/*
 Unregisters memory: no device of its domain reaches it afterwards. Those of other domains that
 it is registered with still do.

 @reg: the registration; NULL does nothing.

 Return: 0, or -errno: EBUSY (mappings, requests or a pool use it, or it is in the table of a
 ring: the message says how many; or another thread is in a call with it); EBADF; EIO (the device
 could not be kept from it: the registration is gone, but keep the memory mapped until the
 process ends).
 Thread: any. Constant time where it is refused, but for late flushes that have completed; it
 waits for a pf_uring_register() of another thread with it. Calls of other threads with the
 registration are not refused for it. Since 0.2.
 */
int pf_reg_destroy(struct pf_reg_t *reg);

/*
 Cuts a part of registered memory into segments that a device can address in one piece, of less
 than 4 GiB each.

 @reg: the registration.
 @off: where the part begins.
 @len: bytes, at least 1.
 @segments: where the segments are stored; their `tag` is not changed.
 @max: how many can be stored.

 Return: how many there are, or -errno: ENOSPC (more than `max`: the message says how many);
 EINVAL (not inside the memory, or 0 bytes); EFAULT; EBADF. Nothing is stored then.
 Thread: any. Since 0.2.

 */
int pf_segments(struct pf_reg_t *reg,
                size_t off,
                size_t len,
                struct pf_block_t *segments,
                unsigned int max) PF_CHECKED;

/*
 Lays out a part of registered memory as the PRP entries of an NVMe command, for a controller
 with pages of 4096 bytes (NVM Express Base Specification, section 4.1.1).

 @reg: the registration, of the controller's domain.
 @off: where the part begins: a multiple of 4.
 @len: bytes, at least 1.
 @lists: pages for PRP lists, each 4096 bytes and aligned for the controller, as pf_get() of a
 pool of such blocks gives them. They are in use until the command has completed. At most 64 are
 used: 127 MiB.
 @n_lists: how many. Nothing changes the array meanwhile, so it is in none of the pages.
 @prp: where PRP1 and PRP2 are stored.

 Return: how many list pages are used, the first of those passed; or -errno: ENOSPC (too few list
 pages); EINVAL (not inside the memory, 0 bytes, `off`, or a list page that is not as above);
 EFAULT; EBADF. Then nothing is stored, except in list pages.
 Thread: any. Since 0.2.

 */
int pf_prp(struct pf_reg_t *reg,
           size_t off,
           size_t len,
           const struct pf_block_t *lists,
           unsigned int n_lists,
           uint64_t *prp) PF_CHECKED;

/*
 Lays out a part of registered memory as the SGL of an NVMe command (NVM Express Base
 Specification, section 4.1.2).

 @reg: the registration, of the controller's domain.
 @off: where the part begins.
 @len: bytes, at least 1.
 @lists: memory for arrays of descriptors, each at least 32 bytes and aligned to 8. They are in
 use until the command has completed. At most 64 are used.
 @n_lists: how many. None is needed for less than 4 GiB: the memory is one piece for the device.
 @sgl1: where the 16 bytes of the command's descriptor are stored.

 Return: how many list pages are used, the first of those passed; or -errno: ENOSPC (too few list
 pages); EINVAL (not inside the memory, 0 bytes, or a list page that is not as above); EFAULT;
 EBADF. Then nothing is stored, except in list pages.
 Thread: any. Since 0.2.

 */
int pf_sgl(struct pf_reg_t *reg,
           size_t off,
           size_t len,
           const struct pf_block_t *lists,
           unsigned int n_lists,
           uint8_t *sgl1) PF_CHECKED;

/*
 Hands registered memory to an io_uring of the program: READ_FIXED and WRITE_FIXED with this
 index then use it, without the kernel pinning it for each. For an arena:
 pf_uring_register_arena().

 @reg: the registration, of at most 1 GiB.
 @ring_fd: the ring, with a table of buffers (io_uring_register_buffers_sparse() makes one). It
 is kept open until pf_uring_unregister().
 @index: the place in the table; what is there is replaced, and is not in the table any more.

 Return: 0, or -errno: EBADF (no ring, or no registration); ENXIO (the ring has no table); EINVAL
 (no such place, or more than 1 GiB); ENOMEM (RLIMIT_MEMLOCK: the message says the command);
 EFAULT (the kernel cannot pin it); EEXIST (the ring is another thread's). Nothing has changed
 then.
 Thread: any, unless the ring is one thread's. Linux 5.13. Allocates. Since 0.2.
 */
int pf_uring_register(struct pf_reg_t *reg, int ring_fd, unsigned int index) PF_CHECKED;

/*
 Removes registered memory from the table of a ring. Requests in flight keep the pages until they
 have completed: the program waits for them before it uses the memory otherwise.

 @reg: the registration.
 @ring_fd: the ring, as pf_uring_register() got it; it may have been closed.
 @index: the place in the table.

 Return: 0, also where the ring's table is gone; or -errno: ENOENT (it is not there); EEXIST (the
 ring is another thread's); EBADF.
 Thread: any, unless the ring is one thread's. Since 0.2.
 */
int pf_uring_unregister(struct pf_reg_t *reg, int ring_fd, unsigned int index) PF_CHECKED;

/*
 Reads the counters of an object.

 @handle: a domain, an arena, a pool, a page pool, a controller or a queue.
 @counters: where they are stored; NULL to learn their number.
 @max: how many fit there.

 Owners count without locks or shared writes, so the counters are exact whenever no thread is in
 a call with the object, and may be of slightly different times else. The peak of an
 arena's frames is approximate: it is noted as frames come and go. A domain's are followed by
 those of its IOMMU and of its invalidation queue.

 Return: how many counters the object has, of which the first `max` are stored; or -errno: EBADF;
 EBUSY (a thread is in a call with the page pool or queue, which belongs to one; its calls wait
 for this one, and are not refused for it, except a `*_destroy`).
 Thread: any. Allocates. Since 0.2.

 */
int pf_stats(const void *handle, struct pf_counter *counters, unsigned int max);

/*
 Reads the counters of an object as one JSON object, their values by their names.

 @handle: as for pf_stats().
 @buffer: where the text is stored, with a NUL behind it; cut at `len` - 1 bytes. NULL to learn
 its length.
 @len: the size of the buffer.

 Return: the length of the whole text, without the NUL; or -errno: as pf_stats().
 Thread: any. Allocates. Since 0.2.

 */
int pf_stats_json(const void *handle, char *buffer, size_t len);

/*
 Creates a protected request loop for a driver of the program's own. It has the memory of
 requests for as long as the device may reach it, and returns it when the device cannot. It does
 not know the device: the driver tells it what has become of a request. Retries and deadlines of
 commands are the driver's.

 @domain: the domain that the device is in.
 @opts: the options; `depth` at least.
 @out: where the handle is stored.

 Return: 0, or -errno: EINVAL (depth, held, unknown protection or flags); ENOMEM; E2BIG; EBADF;
 EFAULT; ENFILE.
 Thread: any. A loop is used by one thread at a time: a call beside another's gives EBUSY.
 Ownership: it keeps the domain. Allocates all that it needs. Ends with pf_requests_destroy().
 Since 0.2.

 */
int pf_requests_create(struct pf_domain_t *domain,
                       const struct pf_requests_opts *opts,
                       struct pf_requests_t **out) PF_CHECKED;

/*
 Destroys a request loop. Requests that are lost are quarantined for good: their device may still
 work on them. Memory of those that are late is handed back when their flush completes.

 @requests: the loop; NULL does nothing.

 Return: 0, or -errno: EBUSY (requests are at the device or have not been reported: the message
 counts them; or another thread is in a call with it); EBADF.
 Thread: any. It may wait 50 ms for flushes. Since 0.2.
 */
int pf_requests_destroy(struct pf_requests_t *requests);

/*
 Begins a request: maps each payload, all or none. Until the request is reported its memory is in
 use, and pf_free() refuses it.

 @requests: the loop.
 @payloads: the memory; what they point to is read by this call only.
 @n: how many: 0 to PF_MOST_PAYLOADS.
 @token: where the name of the request is stored: never 0. pf_token_slot() of it is below the sum
 of `depth` and `held`, and no other request has that slot before this one is reported: the index
 in a driver's table.
 @iovas: where the device's address of each payload is stored, `n` of them; NULL if `n` is 0.

 Return: 0, or -errno: EAGAIN (as many requests as `depth` are at the device, or no slot is left:
 poll first); ENXIO (memory that is not in the domain, or with PF_PROTECT_STATIC does not stay
 mapped); EINVAL (memory that is not allocated, 0 bytes, no direction, reserved fields, too many
 payloads: the message has the index); ENOMEM, ENOSPC (mapping it); EIO, ETIMEDOUT (the IOMMU);
 EFAULT; EBADF; EBUSY. Nothing is mapped then.
 Thread: one at a time. Allocates for more than two payloads. Ownership: the memory is lent until
 the report. Since 0.2.

 */
int pf_requests_begin(struct pf_requests_t *requests,
                      const struct pf_payload *payloads,
                      unsigned int n,
                      uint64_t *token,
                      uint64_t *iovas) PF_CHECKED;

/*
 Says that the device no longer works on a request: the next pf_requests_poll() revokes its
 access. One that was said to be lost may complete after all.

 @requests: the loop.
 @token: the request.
 @result: the caller's: its report has it.

 Return: 0, or -errno: ESTALE (it has ended, is another loop's, or none: nothing has changed);
 EBADF; EBUSY.
 Thread: one at a time. Since 0.2.
 */
int pf_requests_completed(struct pf_requests_t *requests, uint64_t token, uint64_t result) PF_CHECKED;

/*
 Says that a request was never submitted: revokes its access, and waits for the flush, whatever
 the protection. The request has ended then, without a report.

 @requests: the loop.
 @token: the request.

 Return: 0: no device reaches the payloads; PF_STAYS_MAPPED: one is mapped for its lifetime; or
 -errno: ETIMEDOUT (the flush is late, and the memory stays in use: pf_requests_poll() reports
 the request when it ends); EIO (the flush never completes, and the memory is quarantined);
 ESTALE (it has ended, was said to be lost, is another loop's, or none: nothing has changed);
 EBADF; EBUSY.
 Thread: one at a time. May allocate small amounts: in a software domain, and for a request that
 is lost. Since 0.2.
 */
int pf_requests_refused(struct pf_requests_t *requests, uint64_t token) PF_CHECKED;

/*
 Says that a request was given up, and the device may still work on it: its memory stays mapped
 and in use, so that a late access reaches nothing else. It takes no place of the depth any more,
 and keeps its slot until pf_requests_completed() or pf_requests_stopped().

 @requests: the loop.
 @token: the request.

 Return: 0, or -errno: ESTALE (it has ended or is lost, is another loop's, or none: nothing has
 changed); EBADF; EBUSY.
 Thread: one at a time. Since 0.2.
 */
int pf_requests_lost(struct pf_requests_t *requests, uint64_t token) PF_CHECKED;

/*
 Says that the device is proven quiet, as after a pf_device_reset() that has succeeded: all
 requests that are at the device or lost are completed, with the result 0.

 @requests: the loop.

 Return: 0, or -errno: EBADF; EBUSY.
 Thread: one at a time. Since 0.2.
 */
int pf_requests_stopped(struct pf_requests_t *requests) PF_CHECKED;

/*
 Revokes access to what was completed, and reports requests whose memory no device can reach any
 more, and those whose flush has become late. PF_PROTECT_STRICT waits for the flush of what it
 revokes, for at most `flush_ns`; the others never wait.

 @requests: the loop.
 @done: where the reports are stored.
 @max: how many fit; what is left is reported by the next call.

 Return: how many were stored; or -errno: EFAULT; EBADF; EBUSY.
 Thread: one at a time. May allocate small amounts: in a software domain, and for a request that
 is lost. Ownership: the memory of what is reported is the caller's again, unless it is
 PF_END_LATE or PF_END_LOST. Since 0.2.

 */
int pf_requests_poll(struct pf_requests_t *requests, struct pf_done *done, unsigned int max) PF_CHECKED;

/*
 Polls, and if that finds nothing waits until a flush has completed, a request has become late,
 or the time has passed. It does not wait for the device: where nothing waits for a flush it
 returns at once.

 @requests: the loop.
 @ns: nanoseconds to wait at most; they also end the wait of PF_PROTECT_STRICT.
 @done: where the reports are stored.
 @max: how many fit; what is left is reported by the next call.

 Return: as pf_requests_poll().
 Thread: one at a time. May allocate small amounts: in a software domain, and for a request that
 is lost. Since 0.2.

 */
int pf_requests_wait(struct pf_requests_t *requests,
                     uint64_t ns,
                     struct pf_done *done,
                     unsigned int max) PF_CHECKED;

/*
 Prepares for a sleep, and returns a descriptor for poll() and epoll, always the same: it becomes
 readable when pf_requests_poll() may find something, or when a flush has become late; at once
 where that is so already. Poll then, and call this again before the next sleep, which also
 clears it. It tells nothing of the device.

 @requests: the loop.

 Return: the descriptor; or -errno: EMFILE, ENFILE; EBADF; EBUSY.
 Thread: one at a time. Allocates the first time. Ownership: the loop's: do not read, write or
 close it. Since 0.2.
 */
int pf_requests_fd(struct pf_requests_t *requests) PF_CHECKED;

/*
 Sets the function that sees each alloc, free, map and revoke; NULL for none. Off at first.

 @function: called in the thread of the event, after the event, inside its call. It must not
 call the library, and must not jump out. Calls that began before it was replaced may still call
 it. The event of a pf_put() may come after that of the block's next pf_get() by another thread.
 @arg: passed to it.
 @former_arg: where the argument of the former function is stored, NULL if there was none; NULL:
 not needed. A function that calls the former one, with this argument, leaves both at work; it
 may be called before this call has returned.

 Return: the former function; NULL if there was none. In a child nothing is set, and it is NULL.
 Thread: any. Allocates 16 bytes for each function that is set, which stay for good. Ownership:
 `arg` stays the caller's. Since 0.2.

 */
pf_trace_fn pf_trace_set(pf_trace_fn function, void *arg, void **former_arg);

/*
 Returns the version of the library: as PF_VERSION of the header that belongs to it. Structs and
 functions that the header has and an older library lacks are refused (E2BIG), or not linked.

 Thread: any; also in a child. Since 0.2.
 */
unsigned int pf_version(void);

/* The slot of a request of a loop (pf_requests_begin()): the index in a driver's table. */
static inline uint32_t pf_token_slot(uint64_t token)
{
    return (uint32_t)(token & 0xfffff);
}

/*
 Registers of a device (pf_device_bar()), in the byte order of the machine, which is little-endian as
 theirs. An access has exactly its width. A write comes after all earlier stores of the thread to
 memory, and a read before all later loads. `offset` is a multiple of the width, and the register is
 inside the BAR: it is not checked.
 */
#if defined(__x86_64__)
#define PF_BEFORE_WRITE() __atomic_thread_fence(__ATOMIC_RELEASE)
#define PF_AFTER_READ() __atomic_thread_fence(__ATOMIC_ACQUIRE)
#elif defined(__aarch64__)
#define PF_BEFORE_WRITE() __asm__ __volatile__("dmb oshst" ::: "memory")
#define PF_AFTER_READ() __asm__ __volatile__("dmb oshld" ::: "memory")
#elif defined(__riscv)
#define PF_BEFORE_WRITE() __asm__ __volatile__("fence w, o" ::: "memory")
#define PF_AFTER_READ() __asm__ __volatile__("fence i, r" ::: "memory")
#else
#error "pinfold.h: x86-64, 64-bit Arm and RISC-V"
#endif

static inline uint8_t pf_read8(const struct pf_bar *bar, uint64_t offset)
{
    uint8_t value =
        *(const volatile uint8_t *)(const volatile void *)((const volatile char *)bar->addr + offset);
    PF_AFTER_READ();
    return value;
}

static inline void pf_write8(const struct pf_bar *bar, uint64_t offset, uint8_t value)
{
    PF_BEFORE_WRITE();
    *(volatile uint8_t *)(volatile void *)((volatile char *)bar->addr + offset) = value;
}

static inline uint16_t pf_read16(const struct pf_bar *bar, uint64_t offset)
{
    uint16_t value =
        *(const volatile uint16_t *)(const volatile void *)((const volatile char *)bar->addr + offset);
    PF_AFTER_READ();
    return value;
}

static inline void pf_write16(const struct pf_bar *bar, uint64_t offset, uint16_t value)
{
    PF_BEFORE_WRITE();
    *(volatile uint16_t *)(volatile void *)((volatile char *)bar->addr + offset) = value;
}

static inline uint32_t pf_read32(const struct pf_bar *bar, uint64_t offset)
{
    uint32_t value =
        *(const volatile uint32_t *)(const volatile void *)((const volatile char *)bar->addr + offset);
    PF_AFTER_READ();
    return value;
}

static inline void pf_write32(const struct pf_bar *bar, uint64_t offset, uint32_t value)
{
    PF_BEFORE_WRITE();
    *(volatile uint32_t *)(volatile void *)((volatile char *)bar->addr + offset) = value;
}

static inline uint64_t pf_read64(const struct pf_bar *bar, uint64_t offset)
{
    uint64_t value =
        *(const volatile uint64_t *)(const volatile void *)((const volatile char *)bar->addr + offset);
    PF_AFTER_READ();
    return value;
}

static inline void pf_write64(const struct pf_bar *bar, uint64_t offset, uint64_t value)
{
    PF_BEFORE_WRITE();
    *(volatile uint64_t *)(volatile void *)((volatile char *)bar->addr + offset) = value;
}

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PINFOLD_H */
