/* Python's configuration for each platform of build_wheels.py, in place of that of the machine that builds. The kernel uses
 * the stable interface only, so it needs no more than sizes, which the compiler knows, and how symbols are imported.
 */
#ifndef __APPLE__ /* pymacconfig.h has these three */
#define SIZEOF_LONG __SIZEOF_LONG__
#define SIZEOF_SIZE_T __SIZEOF_SIZE_T__
#define SIZEOF_VOID_P __SIZEOF_POINTER__
#endif
#define SIZEOF_SHORT __SIZEOF_SHORT__
#define SIZEOF_INT __SIZEOF_INT__
#define SIZEOF_LONG_LONG __SIZEOF_LONG_LONG__
#define SIZEOF_WCHAR_T __SIZEOF_WCHAR_T__
#define SIZEOF_FLOAT __SIZEOF_FLOAT__
#define SIZEOF_DOUBLE __SIZEOF_DOUBLE__
#define SIZEOF_PID_T __SIZEOF_INT__
#define HAVE_STDINT_H 1
#define HAVE_INTTYPES_H 1
#ifdef _WIN32
#define MS_WINDOWS
#define MS_WIN64
#define HAVE_DECLSPEC_DLL
#define Py_ENABLE_SHARED
#else
#define HAVE_UNISTD_H 1
#define HAVE_SYS_TIME_H 1
#define HAVE_SYS_STAT_H 1
#define HAVE_SYS_TYPES_H 1
#endif
