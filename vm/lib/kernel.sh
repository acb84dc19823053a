# shellcheck shell=bash
# Debian's kernel, unpacked but not installed: a folder with `vmlinuz`, `release`, and the guest's
# modules as `modules/NN-name.ko` in load order. Sourced; needs tools.sh.

# The guest's modules; their dependencies come from modules.dep.
guest_modules=(
    virtio_pci virtio_console 9p 9pnet_virtio virtio_blk
    nvme
    vfio_iommu_type1 vfio-pci
    nbd
    # ext4 asks for this one by name when it mounts.
    crc32c_generic ext4
)

# kernel_package: the newest 6.12 that apt offers here, else the release's own kernel (6.1 in Debian
# 12). Debian 12 has 6.12 in its security and its backports archive; the signed package, not
# "-cloud" (no NVMe) and not "-rt".
kernel_package() {
    local meta package
    for meta in linux-image-6.12-amd64 linux-image-amd64; do
        package=$(apt-cache depends "$meta" 2>/dev/null | sed -n 's/^ *Depends: \(linux-image-6[^ ]*-amd64\)$/\1/p' | head -n 1)
        if [ -n "$package" ]; then
            printf '%s\n' "$package"
            return
        fi
    done
    apt-cache search --names-only '^linux-image-6\.12\..*-amd64$' | awk '{print $1}' |
        grep -Ev -- '-(cloud|rt)-' | sort -V | tail -n 1
}

# debian_kernel: prints the folder; fetches and unpacks the kernel if the cache has none.
debian_kernel() {
    local cache found
    cache=$(cache_folder)
    locked "$cache/.lock" fetch_debian_kernel "$cache" >&2
    found=$(newest_kernel "$cache")
    [ -n "$found" ] || die "no kernel in $cache although it was fetched"
    printf '%s\n' "$found"
}

newest_kernel() {
    find "$1" -maxdepth 1 -type d -name 'debian-*' | sort -V | tail -n 1
}

fetch_debian_kernel() {
    local cache=$1 found package release work tree depmod_base
    found=$(newest_kernel "$cache")
    # One that was unpacked with other modules is unpacked again.
    [ "$(cat "$found/wanted" 2>/dev/null || true)" != "${guest_modules[*]}" ] || return 0
    need dpkg-deb:dpkg depmod:kmod xz:xz-utils zstd:zstd
    package=$(kernel_package)
    if [ -z "$package" ] && [ "$(id -u)" = 0 ]; then
        apt_get update || true
        package=$(kernel_package)
    fi
    [ -n "$package" ] || die "apt knows no linux-image package. Please run: sudo apt-get update (a Debian 12 archive is needed)"
    release=${package#linux-image-}
    case $release in
        6.12*) ;;
        *) say "apt has no 6.12 kernel here; using $release" ;;
    esac

    say "fetching $package by apt, to be unpacked but not installed"
    work=$(fetched "$package")
    tree=$work/root/lib/modules/$release
    [ -d "$tree" ] || tree=$work/root/usr/lib/modules/$release
    depmod_base=${tree%/lib/modules/*}
    PATH=$PATH:/usr/sbin:/sbin depmod -b "$depmod_base" "$release"

    mkdir -p "$work/kernel/modules"
    cp "$work/root/boot/vmlinuz-$release" "$work/kernel/vmlinuz"
    cp "$work/root/boot/config-$release" "$work/kernel/config"
    printf '%s\n' "$release" >"$work/kernel/release"
    unpack_modules "$tree" "$work/kernel/modules" "${guest_modules[@]}"
    printf '%s\n' "${guest_modules[*]}" >"$work/kernel/wanted"
    [ -z "$found" ] || rm -rf "$found"
    mv "$work/kernel" "$cache/debian-$release"
    rm -rf "$work"
    say "kernel $release is in $cache"
}

# unpack_modules TREE INTO NAME...: numbers each module after its dependencies (modules.dep lists
# them last one first).
unpack_modules() {
    local tree=$1 into=$2 name path plain number=10
    shift 2
    for name in "$@"; do
        while IFS= read -r path; do
            number=$((number + 1))
            plain=$into/$number-$(basename "${path%%.ko*}").ko
            case $path in
                *.xz) xz -dc "$tree/$path" >"$plain" ;;
                *.zst) zstd -qdc "$tree/$path" >"$plain" ;;
                *) cp "$tree/$path" "$plain" ;;
            esac
        done < <(needed_by "$tree" "$name" | while IFS= read -r path; do
            # Loaded by an earlier one.
            compgen -G "$into/*-$(basename "${path%%.ko*}").ko" >/dev/null || printf '%s\n' "$path"
        done)
    done
}

# needed_by TREE NAME: prints the module's files in load order; nothing if it is built in.
needed_by() {
    awk -v wanted="/${2//[-_]/[-_]}[.]ko" '
        { split($1, head, ":") }
        head[1] ~ wanted { for (i = NF; i > 1; i--) print $i; print head[1]; exit }
    ' "$1/modules.dep"
}
