/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A fio engine on libpinfold: fio's buffers are memory of an arena, and its requests go to an NVMe
 * controller, a model or a real one.
 *
 * fio calls setup() in its first thread; init() and all that follows in the thread of the job.
 */
#include "fio.h"
#include "optgroup.h"
#include "target.h"

/* How long a wait lasts before other queues are looked at, ns. */
#define WAIT_NS (50 * 1000 * 1000)
#define WAIT_NS_OF_SEVERAL (100 * 1000)
#define MAX_QUEUES 64

struct options {
    /* fio stores the job here. */
    struct thread_data *td;
    char *target;
    unsigned protect;
    unsigned queues;
    unsigned poll;
};

static struct fio_option options[] = {
    {
        .name = "target",
        .lname = "Target",
        .type = FIO_OPT_STR_STORE,
        .off1 = offsetof(struct options, target),
        .help = "soft:SIZE, soft:IMAGE (with ,block=4096) or vfio:BDF[/NSID]",
        .category = FIO_OPT_C_ENGINE,
        .group = FIO_OPT_G_INVALID,
    },
    {
        .name = "protect",
        .lname = "Protection",
        .type = FIO_OPT_STR,
        .off1 = offsetof(struct options, protect),
        .help = "When the controller can reach the buffers",
        .def = "batch",
        .posval =
            {
                {.ival = "static", .oval = PF_PROTECT_STATIC, .help = "Always"},
                {.ival = "strict", .oval = PF_PROTECT_STRICT, .help = "A flush, which is waited for"},
                {.ival = "revoke", .oval = PF_PROTECT_REVOKE, .help = "A flush for each request"},
                {.ival = "batch", .oval = PF_PROTECT_BATCH, .help = "A flush for many requests"},
            },
        .category = FIO_OPT_C_ENGINE,
        .group = FIO_OPT_G_INVALID,
    },
    {
        .name = "queues",
        .lname = "Queues",
        .type = FIO_OPT_INT,
        .off1 = offsetof(struct options, queues),
        .help = "Queue pairs of each job, used in turn",
        .def = "1",
        .minval = 1,
        .maxval = MAX_QUEUES,
        .category = FIO_OPT_C_ENGINE,
        .group = FIO_OPT_G_INVALID,
    },
    {
        .name = "poll",
        .lname = "Poll",
        .type = FIO_OPT_BOOL,
        .off1 = offsetof(struct options, poll),
        .help = "Poll for completions, instead of sleeping until an interrupt",
        .def = "0",
        .category = FIO_OPT_C_ENGINE,
        .group = FIO_OPT_G_INVALID,
    },
    {.name = NULL},
};

struct queue {
    pf_queue_t *handle;
    unsigned in_flight;
};

/* A job: one thread. Each io_u is in one place: pending, in flight, done, or fio's. */
struct job {
    struct target *target;
    pf_arena_t *arena;
    void *buffers;
    unsigned depth, n_queues;
    struct queue queues[MAX_QUEUES];
    /* The queue of the next commit. */
    unsigned next;
    /* Requests that commit() submits, each with the iovec of the same index. */
    unsigned n_pending;
    struct pf_request *pending;
    struct iovec *iovecs;
    /* Completed, a ring: from `first` on. */
    unsigned first, n_done;
    struct io_u **done;
    /* Those that the last getevents() returned. */
    struct io_u **events;
    struct pf_completion *completions;
};

struct ioengine_ops ioengine;

/* Reports a failure of libpinfold, which is -errno. Returns the errno. */
static int report(struct thread_data *td, const char *what, int failed) {
    log_err("pinfold: %s: %s\n", what, pf_strerror_last());
    td_verror(td, -failed, what);
    return -failed;
}

static int refuse(struct thread_data *td, int error) {
    td_verror(td, error, "pinfold");
    return error;
}

/* Checks what can be checked before a thread exists. */
static int check(struct thread_data *td, const struct pf_nvme_info *info) {
    if (td->o.iodepth > info->max_depth) {
        log_err("pinfold: iodepth=%u: a queue of this target has at most %u requests (more: queues)\n",
                td->o.iodepth, info->max_depth);
        return refuse(td, EINVAL);
    }
    for (enum fio_ddir ddir = DDIR_READ; ddir <= DDIR_TRIM; ddir++) {
        const bool used = ddir == DDIR_READ    ? td_read(td)
                          : ddir == DDIR_WRITE ? td_write(td)
                                               : td_trim(td);
        if (!used)
            continue;
        if (td->o.min_bs[ddir] % info->block_bytes || td->o.bs_unaligned) {
            log_err("pinfold: bs=%llu: the target's blocks have %u bytes\n", td->o.min_bs[ddir],
                    info->block_bytes);
            return refuse(td, EINVAL);
        }
        if (ddir != DDIR_TRIM && td->o.max_bs[ddir] > info->max_transfer) {
            log_err("pinfold: bs=%llu: the largest request has %llu bytes\n", td->o.max_bs[ddir],
                    (unsigned long long)info->max_transfer);
            return refuse(td, EINVAL);
        }
        if (ddir == DDIR_TRIM && !(info->flags & PF_NVME_DISCARD)) {
            log_err("pinfold: the controller cannot trim (no Dataset Management command)\n");
            return refuse(td, EOPNOTSUPP);
        }
    }
    return 0;
}

/* A job's file is its target, whatever name it has. */
static void describe(struct fio_file *f, const struct target *target) {
    f->filetype = FIO_TYPE_BLOCK;
    f->real_file_size = target->info.capacity;
    fio_file_set_size_known(f);
}

static int pinfold_setup(struct thread_data *td) {
    const struct options *o = td->eo;
    struct target *target;
    char why[1024];
    if (td->io_ops != &ioengine) {
        log_err("pinfold: fio has other structs than the headers of this engine: build it for this fio\n");
        return 1;
    }
    if (!td->o.use_thread) {
        log_err("pinfold: jobs are processes, which cannot share a device's memory: add --thread\n");
        return refuse(td, EINVAL);
    }
    if (!o->target) {
        log_err("pinfold: no target: add --target=soft:SIZE, soft:IMAGE or vfio:BDF[/NSID]\n");
        return refuse(td, EINVAL);
    }
    /* The file of a log that is replayed is added when that is read, before pinfold_init(). */
    if (td->files_index != (td->o.read_iolog_file ? 0 : 1)) {
        log_err("pinfold: %u files: a job has one target, --target\n", td->files_index);
        return refuse(td, EINVAL);
    }
    const int failed = target_open(o->target, &target, why, sizeof why);
    if (failed) {
        log_err("pinfold: %s\n", why);
        return refuse(td, -failed);
    }
    struct job *job = calloc(1, sizeof *job);
    const int invalid = job ? check(td, &target->info) : refuse(td, ENOMEM);
    if (invalid) {
        free(job);
        target_close(target);
        return invalid;
    }
    job->target = target;
    job->depth = td->o.iodepth;
    job->n_queues = o->queues;
    td->io_ops_data = job;
    if (td->files_index)
        describe(td->files[0], target);
    return 0;
}

/* Reports that queue `at` of a job cannot be created: by the options that ask for less. */
static int refuse_queue(struct thread_data *td, unsigned at, int failed) {
    const struct options *o = td->eo;
    if (failed == -ENOSPC) {
        log_err("pinfold: queues=%u: the target has no queue%s left for queue %u of this job: lower "
                "queues or numjobs%s\n",
                o->queues, o->poll ? "" : " with an interrupt", at + 1,
                o->poll ? "" : ", or set poll=1");
        return refuse(td, ENOSPC);
    }
    log_err("pinfold: iodepth=%u: no memory for the rings of queue %u of this job: lower iodepth, "
            "queues or numjobs\n",
            td->o.iodepth, at + 1);
    return report(td, "a queue", failed);
}

static int pinfold_init(struct thread_data *td) {
    const struct options *o = td->eo;
    struct job *job = td->io_ops_data;
    const struct pf_queue_opts opts = {
        .struct_size = sizeof opts,
        .depth = job->depth,
        .protect = o->protect,
        .flags = o->poll ? 0 : PF_QUEUE_INTERRUPT,
    };
    if (td->files_index != 1) {
        log_err("pinfold: %u files in the log: a job has one target, --target\n", td->files_index);
        return refuse(td, EINVAL);
    }
    if (td->o.read_iolog_file)
        describe(td->files[0], job->target);
    struct fio_file *f = td->files[0];
    /* fio's size of a device that is to be filled, without --size, is unlimited. */
    if (td->o.fill_device && f->file_offset <= f->real_file_size &&
        f->io_size > f->real_file_size - f->file_offset)
        f->io_size = f->real_file_size - f->file_offset;
    if (f->file_offset > f->real_file_size) {
        log_err("pinfold: offset=%llu: the target ends at %llu\n",
                (unsigned long long)f->file_offset, (unsigned long long)f->real_file_size);
        return refuse(td, ENOSPC);
    }
    if (f->io_size > f->real_file_size - f->file_offset) {
        log_err("pinfold: offset=%llu and size=%llu: the target ends at %llu\n",
                (unsigned long long)f->file_offset, (unsigned long long)f->io_size,
                (unsigned long long)f->real_file_size);
        return refuse(td, ENOSPC);
    }
    job->pending = calloc(job->depth, sizeof *job->pending);
    job->iovecs = calloc(job->depth, sizeof *job->iovecs);
    job->done = calloc(job->depth, sizeof(struct io_u *));
    job->events = calloc(job->depth, sizeof(struct io_u *));
    job->completions = calloc(job->depth, sizeof *job->completions);
    if (!job->pending || !job->iovecs || !job->done || !job->events || !job->completions)
        return refuse(td, ENOMEM);
    for (unsigned at = 0; at < job->n_queues; at++) {
        const int failed = pf_queue_create(job->target->nvme, &opts, &job->queues[at].handle);
        if (failed)
            return refuse_queue(td, at, failed);
    }
    return 0;
}

/* Reports that there is no memory for the job's buffers, by the options that ask for less. fio has
 * set numjobs to 1 in each of the jobs. */
static int report_buffers(struct thread_data *td, size_t bytes, int failed) {
    log_err("pinfold: iodepth=%u of up to bs=%llu are %zu bytes of buffers for each job: lower "
            "iodepth, bs or numjobs\n",
            td->o.iodepth, (unsigned long long)td_max_bs(td), bytes);
    /* fio does not look at the result, and would use buffers at 0. */
    td->terminate = true;
    return report(td, "the job's buffers", failed);
}

/* The job's memory: mapped as a whole if the controller may always reach it. */
static int pinfold_iomem_alloc(struct thread_data *td, size_t bytes) {
    const struct options *o = td->eo;
    struct job *job = td->io_ops_data;
    const struct pf_arena_opts opts = {
        .struct_size = sizeof opts,
        .size = bytes,
        .policy = o->protect == PF_PROTECT_STATIC ? PF_POLICY_WHOLE : PF_POLICY_PER_USE,
    };
    if (!job->arena) {
        const int failed = pf_arena_create(job->target->domain, &opts, &job->arena);
        if (failed)
            return report_buffers(td, bytes, failed);
    }
    job->buffers = pf_alloc(job->arena, bytes, NULL);
    td->orig_buffer = job->buffers;
    return job->buffers ? 0 : report_buffers(td, bytes, -errno);
}

/* Waits for all requests: fio may end a job before it has asked for their results. Its io_us may be
 * gone, so they are not touched. */
static int drain(struct job *job) {
    job->n_pending = job->n_done = 0;
    for (unsigned at = 0; at < job->n_queues; at++) {
        struct queue *queue = &job->queues[at];
        while (queue->in_flight) {
            const int ready = pf_queue_wait(queue->handle, WAIT_NS);
            const int n = ready < 0 ? ready
                                    : pf_complete(queue->handle, job->completions, queue->in_flight);
            if (n < 0)
                return n;
            queue->in_flight -= n;
        }
    }
    return 0;
}

static void pinfold_iomem_free(struct thread_data *td) {
    struct job *job = td->io_ops_data;
    if (!job || !job->arena)
        return;
    int failed = drain(job);
    if (!failed)
        failed = pf_free(job->arena, job->buffers);
    if (!failed)
        failed = pf_arena_destroy(job->arena);
    if (failed)
        report(td, "the end of the job's buffers", failed);
    job->arena = NULL;
    job->buffers = NULL;
}

static void pinfold_cleanup(struct thread_data *td) {
    struct job *job = td->io_ops_data;
    if (!job)
        return;
    const int late = drain(job);
    if (late)
        report(td, "the last requests of the job", late);
    for (unsigned at = 0; at < job->n_queues; at++) {
        const int failed = job->queues[at].handle ? pf_queue_destroy(job->queues[at].handle) : 0;
        if (failed)
            report(td, "the end of a queue", failed);
    }
    const int failed = target_close(job->target);
    if (failed)
        report(td, "the end of the target", failed);
    free(job->pending);
    free(job->iovecs);
    free(job->done);
    free(job->events);
    free(job->completions);
    free(job);
    td->io_ops_data = NULL;
}

static void push_done(struct job *job, struct io_u *io_u) {
    job->done[(job->first + job->n_done) % job->depth] = io_u;
    job->n_done++;
}

static enum fio_q_status pinfold_queue(struct thread_data *td, struct io_u *io_u) {
    struct job *job = td->io_ops_data;
    struct pf_request *request = &job->pending[job->n_pending];
    struct iovec *iovec = &job->iovecs[job->n_pending];
    fio_ro_check(td, io_u);
    if (job->n_pending == job->depth)
        return FIO_Q_BUSY;
    memset(request, 0, sizeof *request);
    request->nsid = job->target->info.nsid;
    request->user_data = (uintptr_t)io_u;
    io_u->engine_data = NULL;
    switch (io_u->ddir) {
    case DDIR_READ:
    case DDIR_WRITE:
        request->op = io_u->ddir == DDIR_READ ? PF_READ : PF_WRITE;
        iovec->iov_base = io_u->xfer_buf;
        iovec->iov_len = io_u->xfer_buflen;
        request->iov = iovec;
        request->iovcnt = 1;
        request->offset = io_u->offset;
        break;
    case DDIR_TRIM:
        request->op = PF_DISCARD;
        request->offset = io_u->offset;
        request->len = io_u->xfer_buflen;
        break;
    case DDIR_SYNC:
    case DDIR_DATASYNC:
    case DDIR_SYNC_FILE_RANGE:
        request->op = PF_FLUSH;
        break;
    default:
        io_u->error = EINVAL;
        return FIO_Q_COMPLETED;
    }
    job->n_pending++;
    return FIO_Q_QUEUED;
}

/* Removes the first `n` pending requests. */
static void consume(struct job *job, unsigned n) {
    job->n_pending -= n;
    memmove(job->pending, job->pending + n, job->n_pending * sizeof *job->pending);
    memmove(job->iovecs, job->iovecs + n, job->n_pending * sizeof *job->iovecs);
    for (unsigned at = 0; at < job->n_pending; at++)
        if (job->pending[at].iov)
            job->pending[at].iov = &job->iovecs[at];
}

/* Records when the first `n` pending requests were submitted. */
static void note_submitted(struct thread_data *td, const struct job *job, unsigned n) {
    struct timespec now;
    io_u_mark_submit(td, n);
    if (!fio_fill_issue_time(td))
        return;
    fio_gettime(&now, NULL);
    for (unsigned at = 0; at < n; at++) {
        struct io_u *io_u = (struct io_u *)(uintptr_t)job->pending[at].user_data;
        io_u->issue_time = now;
        io_u_queued(td, io_u);
    }
}

static unsigned in_flight(const struct job *job) {
    unsigned n = 0;
    for (unsigned at = 0; at < job->n_queues; at++)
        n += job->queues[at].in_flight;
    return n;
}

static int pinfold_commit(struct thread_data *td) {
    struct job *job = td->io_ops_data;
    struct queue *queue = &job->queues[job->next];
    while (job->n_pending) {
        const int accepted = pf_submit(queue->handle, job->pending, job->n_pending);
        /* The queue is full: the rest is submitted when something has completed. */
        if (accepted == 0 || accepted == -EAGAIN)
            break;
        /* All memory for lists of pages is in use, of this job's requests or of other jobs'. */
        if (accepted == -ENOMEM && (in_flight(job) || job->target->jobs > 1))
            break;
        if (accepted < 0) {
            struct io_u *io_u = (struct io_u *)(uintptr_t)job->pending[0].user_data;
            log_err("pinfold: %s\n", pf_strerror_last());
            io_u->error = -accepted;
            push_done(job, io_u);
            consume(job, 1);
            continue;
        }
        queue->in_flight += accepted;
        note_submitted(td, job, accepted);
        consume(job, accepted);
    }
    job->next = (job->next + 1) % job->n_queues;
    return 0;
}

/* Takes what has completed from all queues. Called when no io_u is in `done`, so all fit. */
static int reap(struct job *job) {
    for (unsigned at = 0; at < job->n_queues; at++) {
        struct queue *queue = &job->queues[at];
        if (!queue->in_flight)
            continue;
        const int n = pf_complete(queue->handle, job->completions, queue->in_flight);
        if (n < 0)
            return n;
        queue->in_flight -= n;
        for (int each = 0; each < n; each++) {
            const struct pf_completion *completion = &job->completions[each];
            struct io_u *io_u = (struct io_u *)(uintptr_t)completion->user_data;
            io_u->error = -completion->result;
            io_u->engine_data = (void *)(uintptr_t)completion->status;
            push_done(job, io_u);
        }
    }
    return 0;
}

/* Waits until a queue, or one of another job, may have completed something. */
static int wait_for_one(struct job *job) {
    const struct timespec others = {.tv_nsec = WAIT_NS_OF_SEVERAL};
    for (unsigned at = 0; at < job->n_queues; at++)
        if (job->queues[at].in_flight) {
            const int ready = pf_queue_wait(job->queues[at].handle,
                                            job->n_queues == 1 ? WAIT_NS : WAIT_NS_OF_SEVERAL);
            return ready == -ETIMEDOUT ? 0 : ready;
        }
    nanosleep(&others, NULL);
    return 0;
}

/* fio gives a time only with `min` 0, and then it is 0. */
static int pinfold_getevents(struct thread_data *td, unsigned min, unsigned max,
                             const struct timespec *t) {
    struct job *job = td->io_ops_data;
    unsigned n = 0;
    for (;;) {
        int failed = job->n_done ? 0 : reap(job);
        while (job->n_done && n < max) {
            job->events[n++] = job->done[job->first];
            job->first = (job->first + 1) % job->depth;
            job->n_done--;
        }
        if (!failed && n >= min)
            return n;
        if (!failed && job->n_pending)
            failed = pinfold_commit(td);
        if (!failed)
            failed = wait_for_one(job);
        if (failed < 0) {
            log_err("pinfold: %s\n", pf_strerror_last());
            return failed;
        }
    }
}

static struct io_u *pinfold_event(struct thread_data *td, int event) {
    const struct job *job = td->io_ops_data;
    return job->events[event];
}

/* fio frees the text. */
static char *pinfold_errdetails(struct io_u *io_u) {
    char *text = NULL;
    if (asprintf(&text, "pinfold: %s, NVMe status %#x (status field of the completion)",
                 strerror(io_u->error), (unsigned)(uintptr_t)io_u->engine_data) < 0)
        return NULL;
    return text;
}

static int pinfold_open_file(struct thread_data *td, struct fio_file *f) {
    return 0;
}

static int pinfold_close_file(struct thread_data *td, struct fio_file *f) {
    return 0;
}

struct ioengine_ops ioengine = {
    .name = "pinfold",
    .version = FIO_IOOPS_VERSION,
    /* Submission times are those of commit(); workers of io_submit_mode=offload have no queue. */
    .flags = FIO_DISKLESSIO | FIO_NODISKUTIL | FIO_NOEXTEND | FIO_NO_OFFLOAD |
             FIO_ASYNCIO_SETS_ISSUE_TIME,
    .setup = pinfold_setup,
    .init = pinfold_init,
    .iomem_alloc = pinfold_iomem_alloc,
    .iomem_free = pinfold_iomem_free,
    .queue = pinfold_queue,
    .commit = pinfold_commit,
    .getevents = pinfold_getevents,
    .event = pinfold_event,
    .errdetails = pinfold_errdetails,
    .cleanup = pinfold_cleanup,
    .open_file = pinfold_open_file,
    .close_file = pinfold_close_file,
    .options = options,
    .option_struct_size = sizeof(struct options),
};
