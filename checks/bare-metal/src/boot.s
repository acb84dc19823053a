# Entered by a loader for PVH ("x86/HVM direct boot ABI" of Xen): 32 bits, no paging, %ebx has the
# physical address of the start information. Maps the first 4 GiB where they are, enters long mode,
# enables SSE, which compiled code uses, and calls `bare_main`.

    .section .note.pvh, "a", @note
    .long 4                     # bytes of the name
    .long 4                     # bytes of the entry
    .long 18                    # XEN_ELFNOTE_PHYS32_ENTRY
    .asciz "Xen"
    .long start32

    .section .text.boot, "ax"
    .code32
    .globl start32
start32:
    cli
    cld
    movl %ebx, %edi             # the first argument

    # 2,048 leaves of 2 MiB: present, writable. Those above 3 GiB, where registers are, not cached.
    movl $0x83, %eax
    xorl %ecx, %ecx
1:  movl %eax, directories(, %ecx, 8)
    addl $0x200000, %eax
    incl %ecx
    cmpl $1536, %ecx
    jne 2f
    orl $0x18, %eax
2:  cmpl $2048, %ecx
    jne 1b
    # Four directories, present and writable, below one page of pointers to them, below the root.
    movl $directories + 3, %eax
    xorl %ecx, %ecx
3:  movl %eax, pointers(, %ecx, 8)
    addl $0x1000, %eax
    incl %ecx
    cmpl $4, %ecx
    jne 3b
    movl $pointers + 3, root

    movl %cr4, %eax
    orl $0x620, %eax            # PAE, OSFXSR, OSXMMEXCPT
    movl %eax, %cr4
    movl $root, %eax
    movl %eax, %cr3
    movl $0xc0000080, %ecx      # EFER
    rdmsr
    orl $0x100, %eax            # LME
    wrmsr
    movl %cr0, %eax
    andl $0xfffffffb, %eax      # not EM
    orl $0x80000003, %eax       # PG, MP, PE
    movl %eax, %cr0
    lgdt descriptors_at
    ljmp $8, $start64

    .code64
start64:
    movw $16, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    movl $stack_end, %esp
    xorl %ebp, %ebp
    movl %edi, %edi             # the upper half is 0
    call bare_main
4:  hlt
    jmp 4b

    # Named by the unwinding paths of the prebuilt `alloc`, which a program that aborts never takes.
    .globl _Unwind_Resume
    .globl rust_eh_personality
_Unwind_Resume:
rust_eh_personality:
    ud2

    .section .rodata.boot, "a"
    .balign 8
descriptors:
    .quad 0
    .quad 0x00209a0000000000    # code of 64 bits
    .quad 0x0000920000000000    # data
descriptors_at:
    .word . - descriptors - 1
    .long descriptors

    .section .bss.boot, "aw", @nobits
    .balign 4096
root:
    .skip 4096
pointers:
    .skip 4096
directories:
    .skip 4 * 4096
    .skip 256 * 1024
stack_end:
