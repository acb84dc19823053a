# shellcheck shell=bash
# The devices of the machine. Sourced.
#
# | guest's name | address      | what it is                                                      | id for device_del |
# | nvme0        | 0000:01:00.0 | 512-byte blocks, MDTS 512 KiB, 256 MiB                           | nvme0             |
# | nvme1        | 0000:02:00.0 | 4 KiB blocks, MDTS 16 KiB, 256 MiB                               | nvme1             |
# | nvme2        | 0000:03:00.0 | no MDTS; namespace 1: 512-byte, namespace 2: 4 KiB; 256 MiB each | nvme2             |
# | vda          | 0000:04:00.0 | virtio-blk behind the IOMMU, 64 MiB                              | vblk              |
# | sda          | 0000:00:13.0 | AHCI, a SATA disk of 64 MiB                                      | ahci              |
# | (none)       | 0000:00:12.0 | QEMU's edu, a DMA engine of 4 KiB                                | edu               |
#
# Each disk is behind a root port of its own (00:04.0 to 00:07.0), and therefore an IOMMU group of its
# own and hot-pluggable.
# PINFOLD_VM_IOMMU has the IOMMU's options, where a test wants others, PINFOLD_VM_DEVICE a device more.
# PINFOLD_VM_TRACE is a file for QEMU's trace of the IOMMU.
# shellcheck disable=SC2054 # the commas are QEMU's

# image FILE SIZE: creates a sparse file.
image() { truncate -s "$2" "$1"; }

# machine_arguments WORK MEMORY CPUS ACCEL: fills the array `machine`.
machine_arguments() {
    local work=$1 memory=$2 cpus=$3 accel=$4 model=$cpu_model number clock=()
    case $accel in
        tcg) accel=tcg,thread=multi ;;
        # Of its time the machine waits through none: where all processors are idle, its clock jumps.
        icount) accel=tcg,thread=single clock=(-icount shift=4,sleep=off) ;;
        *) model=host ;;
    esac
    machine=(
        "${clock[@]}" -nodefaults -no-user-config -no-reboot -display none
        -machine q35,kernel-irqchip=split -accel "$accel" -cpu "$model" -smp "$cpus" -m "$memory"
        -global ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off
        -device "intel-iommu,${PINFOLD_VM_IOMMU:-intremap=on,caching-mode=on}"
        -device isa-debug-exit,iobase=0xf4,iosize=0x04
    )
    [ -z "${PINFOLD_VM_TRACE:-}" ] ||
        machine+=(-D "$PINFOLD_VM_TRACE" -trace "enable=vtd_iotlb_page_*" -trace "enable=vtd_inv_desc_*" -trace enable=vtd_reg_write
            -trace enable=vtd_dmar_fault)
    for number in 0 1 2 3; do
        machine+=(-device "pcie-root-port,id=port$number,bus=pcie.0,addr=0x$((number + 4)).0,chassis=$((number + 1)),slot=$((number + 1))")
    done

    image "$work/nvme0.raw" 256M
    image "$work/nvme1.raw" 256M
    image "$work/nvme2-1.raw" 256M
    image "$work/nvme2-2.raw" 256M
    image "$work/vblk.raw" 64M
    image "$work/sata.raw" 64M
    drive nvme0 "$work/nvme0.raw"
    drive nvme1 "$work/nvme1.raw"
    drive nvme2-1 "$work/nvme2-1.raw"
    drive nvme2-2 "$work/nvme2-2.raw"
    drive vblk "$work/vblk.raw"
    drive sata "$work/sata.raw"
    machine+=(
        -device nvme,id=nvme0,bus=port0,serial=pinfold0
        -device nvme-ns,drive=nvme0,bus=nvme0,nsid=1,logical_block_size=512,physical_block_size=512
        -device nvme,id=nvme1,bus=port1,serial=pinfold1,mdts=2
        -device nvme-ns,drive=nvme1,bus=nvme1,nsid=1,logical_block_size=4096,physical_block_size=4096
        -device nvme,id=nvme2,bus=port2,serial=pinfold2,mdts=0
        -device nvme-ns,drive=nvme2-1,bus=nvme2,nsid=1,logical_block_size=512,physical_block_size=512
        -device nvme-ns,drive=nvme2-2,bus=nvme2,nsid=2,logical_block_size=4096,physical_block_size=4096
        -device virtio-blk-pci,id=vblk,bus=port3,drive=vblk,iommu_platform=on,disable-legacy=on
        -device ahci,id=ahci,bus=pcie.0,addr=0x13
        -device ide-hd,drive=sata,bus=ahci.0,serial=pinfold-sata
        -device edu,id=edu,bus=pcie.0,addr=0x12,dma_mask=0xffffffffffffffff
    )
    [ -z "${PINFOLD_VM_DEVICE:-}" ] || machine+=(-device "$PINFOLD_VM_DEVICE")
}

# The data need not outlive the machine: no flush to the host's disk.
drive() { machine+=(-drive "id=$1,file=$2,if=none,format=raw,cache=unsafe,discard=unmap"); }

# Without "erms" and "fsrm": with them kernel and C library copy by `rep movsb`, a byte at a time
# under emulation.
cpu_model=qemu64,+pdpe1gb,+rdrand,+ssse3,+sse4.1,+sse4.2,+popcnt

# channel_arguments WORK: the guest's log, and four byte streams to the host: output, errors,
# requests, and the heartbeat.
channel_arguments() {
    local work=$1 name
    machine+=(-chardev "file,id=log,path=$work/guest.log" -serial chardev:log -device virtio-serial-pci,bus=pcie.0,addr=0x10)
    for name in out err control beat; do
        machine+=(-chardev "file,id=$name,path=$work/$name" -device "virtserialport,chardev=$name,name=$name")
    done
    machine+=(-qmp "pipe:$work/qmp")
}
