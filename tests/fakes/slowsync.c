/* A disk whose syncs do not end: fdatasync waits while the file that EBBTIDE_SYNC_FILE names exists. For LD_PRELOAD. */
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

int fdatasync(int file)
{
    char const *path = getenv("EBBTIDE_SYNC_FILE");
    while (path && !access(path, F_OK))
        usleep(10000);
    return (int)syscall(SYS_fdatasync, file);
}
