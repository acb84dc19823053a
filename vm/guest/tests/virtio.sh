# shellcheck shell=sh disable=SC2154
# A driver that nobody here wrote: virtio-drivers' own, on Pinfold's memory, and the kernel's before and after it.

virtio_blk_on_pinfold() {
    kernels_disk() { for path in "/sys/bus/pci/devices/$vblk"/virtio*/block/*; do echo "/dev/${path##*/}"; done; }
    give_to() {
        echo "$1" >"/sys/bus/pci/devices/$vblk/driver_override"
        echo "$vblk" >"/sys/bus/pci/devices/$vblk/driver/unbind"
        echo "$vblk" >/sys/bus/pci/drivers_probe
        same "driver of $vblk" "$1" "$(driver_of "$vblk")"
    }
    dd if=/dev/urandom of=/tmp/before bs=1M count=8 2>/dev/null
    dd if=/dev/urandom of=/tmp/in bs=1M count=8 2>/dev/null
    dd if=/tmp/before of="$(kernels_disk)" bs=1M oflag=direct 2>/dev/null
    free=$(free_hugepages)

    give_to vfio-pci
    /test/virtio_blk_vfio "$vblk" /tmp/in /tmp/out
    cmp /tmp/before /tmp/out
    # It is gone as if it had never been: what it read lies, the hugepages are back, and it can be done again.
    same "free hugepages afterwards" "$free" "$(free_hugepages)"
    /test/virtio_blk_vfio "$vblk" /tmp/in /tmp/out | tee /tmp/words
    cmp /tmp/in /tmp/out
    has /tmp/words '0 entries of the IOMMU, 0 bytes pinned, 0 bytes in quarantine, 0 bytes leaked'

    give_to virtio-pci
    dd if="$(kernels_disk)" of=/tmp/after bs=1M count=8 iflag=direct 2>/dev/null
    cmp /tmp/in /tmp/after
    note "$(grep shared /tmp/words)"
}
