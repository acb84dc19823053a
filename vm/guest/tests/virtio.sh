# shellcheck shell=sh disable=SC2154
# A third-party driver, virtio-drivers, on Pinfold's memory; the kernel's driver before and after
# it.

virtio_blk_on_pinfold() {
    kernel_disk() { for path in "/sys/bus/pci/devices/$vblk"/virtio*/block/*; do echo "/dev/${path##*/}"; done; }
    dd if=/dev/urandom of=/tmp/before bs=1M count=8 2>/dev/null
    dd if=/dev/urandom of=/tmp/in bs=1M count=8 2>/dev/null
    dd if=/tmp/before of="$(kernel_disk)" bs=1M oflag=direct 2>/dev/null
    free=$(free_hugepages)

    pinfold bind "$vblk"
    /test/virtio_blk_vfio "$vblk" /tmp/in /tmp/out
    cmp /tmp/before /tmp/out
    # It leaves nothing behind: the hugepages are free, and it can run again.
    same "free hugepages afterwards" "$free" "$(free_hugepages)"
    /test/virtio_blk_vfio "$vblk" /tmp/in /tmp/out >/tmp/driver
    cmp /tmp/in /tmp/out
    has /tmp/driver '0 IOMMU entries, 0 bytes pinned, 0 bytes quarantined in the domain, 0 in arenas'

    pinfold unbind "$vblk"
    same "driver of $vblk" virtio-pci "$(driver_of "$vblk")"
    dd if="$(kernel_disk)" of=/tmp/after bs=1M count=8 iflag=direct 2>/dev/null
    cmp /tmp/in /tmp/after
    note "$(grep shared /tmp/driver)"
}
