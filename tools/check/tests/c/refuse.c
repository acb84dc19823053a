/* refuse CALL ERRNO PROGRAM...: runs a program with a filter that refuses a system call, as the profile of a container
 * or an older kernel does. */
#define _GNU_SOURCE
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static const struct { const char *name; unsigned number; } CALLS[] = {
	{ "seccomp", SYS_seccomp }, { "unshare", SYS_unshare }, { "mount", SYS_mount },
};

int main(int argc, char **argv)
{
	for (size_t i = 0; argc > 3 && i < sizeof CALLS / sizeof *CALLS; i++) {
		if (strcmp(CALLS[i].name, argv[1])) continue;
		struct sock_filter filter[] = {
			BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
			BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, CALLS[i].number, 0, 1),
			BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)atoi(argv[2])),
			BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
		};
		struct sock_fprog program = { sizeof filter / sizeof *filter, filter };
		/* Not by the call that may be refused. */
		if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) break;
		execv(argv[3], argv + 3);
		break;
	}
	perror("refuse");
	return 9;
}
